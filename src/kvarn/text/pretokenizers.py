"""How a text is cut into words before byte-level BPE merges inside them, by the name a GGUF file gives.

Contract: the words are llama.cpp's. Each entry is a sequence of patterns; every pattern cuts the pieces that the one
before it left, so that look-ahead never sees past a cut. What no pattern matches stays a piece of its own.
Non-goal: normalization, which llama.cpp does not do for these vocabularies.
"""

from functools import cache

from tokenizers import Regex, pre_tokenizers

from kvarn.errors import KvarnError
from kvarn.text.unicode151 import LETTERS, NUMBERS, PUNCTUATION

# Case is spelled out: (?i) would also match U+017F, the long s.
_CONTRACTION = r"'s|'t|'re|'ve|'m|'ll|'d"
_CONTRACTION_ANY_CASE = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_GPT2 = rf"{_CONTRACTION}| ?<L>+| ?<N>+| ?[^\s<L><N>]+|\s+(?!\S)|\s+"


def _cl100k_like(digits: str) -> str:
    return rf"{_CONTRACTION_ANY_CASE}|[^\r\n<L><N>]?<L>+|{digits}| ?[^\s<L><N>]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


PATTERNS: dict[str, tuple[str, ...]] = {
    "default": (r"[<P>$+<=>^~|]+", _GPT2, r"<N>+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "llama-bpe": (_cl100k_like(r"<N>{1,3}"),),
    "qwen2": (_cl100k_like(r"<N>"),),
    "smollm": (r"<N>", _GPT2),
}
# Names for the same thing.
PATTERNS |= {"llama3": PATTERNS["llama-bpe"], "llama-v3": PATTERNS["llama-bpe"]}

# Words that are a token are taken whole, whatever the merges would make of them.
IGNORE_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3"})


def _members(table: str) -> str:
    ends = [[rf"\x{{{code}}}" for code in entry.split("-")] for entry in table.split()]
    return "".join("-".join(entry) for entry in ends)


@cache
def _classes() -> dict[str, str]:
    # Nested classes, so that <L> reads the same on its own and inside brackets.
    return {"<L>": f"[{_members(LETTERS)}]", "<N>": f"[{_members(NUMBERS)}]", "<P>": f"[{_members(PUNCTUATION)}]"}


def _regex(pattern: str) -> Regex:
    for name, members in _classes().items():
        pattern = pattern.replace(name, members)
    return Regex(pattern)


def pretokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    if name not in PATTERNS:
        raise KvarnError(
            f"pre-tokenizer {name!r} (tokenizer.ggml.pre) is not implemented; there are {', '.join(sorted(PATTERNS))}"
        )
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(_regex(pattern), "isolated") for pattern in PATTERNS[name]
    ]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
