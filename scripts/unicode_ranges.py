"""Prints src/kvarn/text/unicode151.py from a Unicode 15.1 database: that of Python 3.13, or unicodedata2 15.1.

python scripts/unicode_ranges.py > src/kvarn/text/unicode151.py
"""

import sys
import textwrap

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata

VERSION = "15.1.0"
HEADER = '''"""Unicode 15.1: which code points are letters, numbers and punctuation (general categories L, N, P).

Pre-tokenizers split words by these classes. They are listed here because the tables of a regex library
depend on its Unicode version, and other tables give other tokens. scripts/unicode_ranges.py wrote this
file; do not edit it.
"""
'''


def ranges(category: str) -> str:
    spans: list[list[int]] = []
    for code in range(0x110000):
        if not unicodedata.category(chr(code)).startswith(category):
            continue
        if spans and spans[-1][1] == code - 1:
            spans[-1][1] = code
        else:
            spans.append([code, code])
    return " ".join(f"{a:X}" if a == b else f"{a:X}-{b:X}" for a, b in spans)


if unicodedata.unidata_version != VERSION:
    sys.exit(f"Unicode {VERSION} is needed, this is {unicodedata.unidata_version}: use Python 3.13 or unicodedata2")
print(HEADER)
for name, category in (("LETTERS", "L"), ("NUMBERS", "N"), ("PUNCTUATION", "P")):
    print(f'{name} = """\n{textwrap.fill(ranges(category), 120, break_on_hyphens=False)}\n"""')
