"""Pre-tokenizers: they cut a text into words, inside which byte-level BPE then merges.

Contract: the words are those of llama.cpp for the same `tokenizer.ggml.pre`. An entry is a sequence of
patterns. Each pattern cuts the pieces that the previous pattern left, so look-ahead never sees past a
cut. Text that no pattern matches becomes a piece too. Non-goal: normalization, which llama.cpp does not
do for these vocabularies.
"""

from functools import cache

from tokenizers import Regex, pre_tokenizers

from kvarn.errors import BadModel
from kvarn.text.unicode151 import LETTERS, NUMBERS, PUNCTUATION

# Both cases are listed, because (?i) would also match U+017F, the long s.
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
# Other names of the same pattern.
PATTERNS |= {"llama3": PATTERNS["llama-bpe"], "llama-v3": PATTERNS["llama-bpe"]}

# A word that is a token is used as it is, even if the merges give other tokens.
IGNORE_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3"})


def _members(table: str) -> str:
    ends = [[rf"\x{{{code}}}" for code in entry.split("-")] for entry in table.split()]
    return "".join("-".join(entry) for entry in ends)


@cache
def _classes() -> dict[str, str]:
    # Classes may be nested, so <L> works alone and inside brackets.
    return {"<L>": f"[{_members(LETTERS)}]", "<N>": f"[{_members(NUMBERS)}]", "<P>": f"[{_members(PUNCTUATION)}]"}


def _regex(pattern: str) -> Regex:
    for name, members in _classes().items():
        pattern = pattern.replace(name, members)
    return Regex(pattern)


def pretokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    if name not in PATTERNS:
        raise BadModel(
            f"pre-tokenizer {name!r} (tokenizer.ggml.pre) is not implemented; there are {', '.join(sorted(PATTERNS))}"
        )
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(_regex(pattern), "isolated") for pattern in PATTERNS[name]
    ]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
