# ruff: noqa: RUF001
"""Texts that tokenizers get wrong: seeded, the same on every machine and Python version.

Contract: `hard_texts(seed, count)` gives valid Unicode without U+2581, which SentencePiece cannot tell from a space.
Only random.Random.randrange and getrandbits-based calls are used, so that the sequence does not depend on the version.
"""

import random
from collections.abc import Callable, Iterator

RANGES = {
    "ascii": (0x20, 0x7E),
    "control": (0x00, 0x1F),
    "latin": (0x80, 0x24F),
    "combining": (0x300, 0x36F),
    "greek": (0x370, 0x3FF),
    "cyrillic": (0x400, 0x4FF),
    "hebrew": (0x590, 0x5F4),
    "arabic": (0x600, 0x6FF),
    "devanagari": (0x900, 0x97F),
    "tamil": (0xB80, 0xBFF),
    "thai": (0xE00, 0xE7F),
    "georgian": (0x10A0, 0x10FF),
    "hangul jamo": (0x1100, 0x11FF),
    "punctuation": (0x2000, 0x206F),
    "numbers": (0x2070, 0x218B),
    "arrows and mathematics": (0x2190, 0x22FF),
    "kana": (0x3040, 0x30FF),
    "han": (0x4E00, 0x9FFF),
    "hangul": (0xAC00, 0xD7AF),
    "private": (0xE000, 0xF8FF),
    "compatibility": (0xF900, 0xFFFF),
    "gothic and beyond": (0x10330, 0x10FFF),
    "recent scripts": (0x11000, 0x12FFF),
    "recent letters": (0x16000, 0x1E9FF),
    "emoji": (0x1F300, 0x1FAFF),
    "han extensions": (0x20000, 0x323AF),
    "unassigned planes": (0x40000, 0x40FFF),
    "private planes": (0xF0000, 0x10FFFF),
    "anything": (0x00, 0x10FFFF),
}
_WORDS = """
the of Hello WORLD don't DON'T I'LL we'Ve They're x's X'S it'\u017f '\u017f can't've l'été naïve Straße def return self.
__init__ <div> </div> <br/> http://example.org/?a=1&b=2 C++ a.b.c !!! ... --- === ?!?! '' "" `` ' 'd 'LL Ünïcödé Äpfel
нещо на Български ກວ່າ 中文字 日本語 テスト 한국어 العربية עברית हिन्दी ไทย ½ ⅓ ² ①② Ⅷ ٣٤٥ १२३ 𝟘𝟙 𐍈
"""
_LOOKALIKES = """
<s> </s> <unk> <pad> <bos> <eos> <mask> <|im_start|> <|im_end|> <|endoftext|> <|eot_id|> <|user|> <|end|>
<start_of_turn> <end_of_turn> <unused7> [INST] [/INST] <<SYS>> <0x0A> <0xFF> <0x> <|im_start <|im_end| im_end|>
<s <s>> <<s> <tool_call> </tool_call> <table> </table> <h1> <b> </b> <|fim_prefix|> <|file_sep|>
<repo_name> <start_of_image>
"""
_JOINED = """
👨‍👩‍👧‍👦 🏳️‍🌈 👩🏽‍💻 🇸🇪 🇸 1️⃣ 👍🏿 é Å ẛ̣ 각 क्ष \u202eabc\u202c a\u0338 \ufffd \uffff \U0010ffff
"""
WORDS, LOOKALIKES, JOINED = _WORDS.split(), _LOOKALIKES.split(), _JOINED.split()
SPACES = ["\t", "\n", "\r\n", "\r", "\v", "\f", "\x85", "\xa0", "\u1680", "\u2003", "\u2009", "\u200b", "\u2028"]
SPACES += ["\u2029", "\u202f", "\u205f", "\u3000", "\ufeff", " "]
RUNS = [" ", "\n", "\t", "a", "=", "-", "0", "'", "é", "中", "🦙", "\r\n", "\u0301", "\x00", "\ue000"]
NOT_A_SPACE = "\u2581"


def _character(r: random.Random, low: int, high: int) -> str:
    while True:
        code = r.randrange(low, high + 1)
        if not 0xD800 <= code < 0xE000 and chr(code) != NOT_A_SPACE:
            return chr(code)


def _pick(r: random.Random, items: list[str]) -> str:
    return items[r.randrange(len(items))]


def _script(r: random.Random) -> str:
    low, high = RANGES[_pick(r, list(RANGES))]
    return "".join(_character(r, low, high) for _ in range(1 + r.randrange(12)))


def _digits(r: random.Random) -> str:
    return "".join(chr(0x30 + r.randrange(10)) for _ in range(1 + r.randrange(9)))


def _space(r: random.Random) -> str:
    return _pick(r, SPACES) * (1 + r.randrange(4)) + _pick(r, SPACES) * r.randrange(3)


def _run(r: random.Random) -> str:
    character = _pick(r, RUNS)
    return character * (2 + r.randrange(70))


def _long_word(r: random.Random) -> str:
    low, high = RANGES[_pick(r, ["ascii", "latin", "cyrillic", "han", "devanagari"])]
    return "".join(_character(r, max(low, 0x21), high) for _ in range(50 + r.randrange(250)))


def _word(r: random.Random) -> str:
    return _pick(r, WORDS)


def _sentence(r: random.Random) -> str:
    return " ".join(_pick(r, WORDS) for _ in range(2 + r.randrange(10)))


def _lookalike(r: random.Random) -> str:
    return _pick(r, LOOKALIKES)


def _joined(r: random.Random) -> str:
    return _pick(r, JOINED)


PARTS: list[Callable[[random.Random], str]] = [
    _script, _script, _digits, _space, _space, _run, _word, _word, _sentence, _lookalike, _joined,
]  # fmt: skip


def hard_texts(seed: int, count: int) -> Iterator[str]:
    r = random.Random(seed)
    for _ in range(count):
        if r.randrange(50) == 0:
            yield _long_word(r)
        else:
            yield "".join(PARTS[r.randrange(len(PARTS))](r) for _ in range(1 + r.randrange(7)))
