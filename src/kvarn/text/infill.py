"""Filling in the middle: the tokens that mark what stands before and after a gap, and prompts made with them.

Contract: texts are encoded without control tokens, so only this file writes markers. Non-goals: what fits into a
context; where the answer ends.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# By the part that a marker plays: the names that vocabularies have for it.
NAMES = {
    part: (
        *(f"<|fim_{part}|>", f"<fim-{part}>", f"<fim_{part}>", f"<\uff5cfim\u2581{deepseek}\uff5c>"),
        *(f"<{short}>", f"\u2581<{short}>", f"<|code_{part}|>", f"<|{part}|>"),
    )
    for part, deepseek, short in (("prefix", "begin", "PRE"), ("suffix", "hole", "SUF"), ("middle", "end", "MID"))
} | {
    "pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>"),
    "repository": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "file": ("<|file_sep|>",),
}
PROJECT, THIS_FILE = "project\n", "filename\n"  # names for a model that was trained on whole repositories
Encode = Callable[[str], list[int]]


class Extra(NamedTuple):
    """Another file that may help: its name and its text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class GapMarkers:
    """Token ids."""

    prefix: int
    suffix: int
    middle: int
    pad: int | None = None
    repository: int | None = None
    file: int | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """GapMarkers that end an answer: the model begins something else."""
        return tuple(id for id in (self.pad, self.repository, self.file) if id is not None)

    def prompt(self, encode: Encode, before: str, after: str, extra: Sequence[Extra] = ()) -> list[int]:
        """Token ids, without BOS. The answer belongs between `before` and `after`."""
        tokens = [*self._extra(encode, extra), self.prefix, *encode(before)]
        return [*tokens, self.suffix, *encode(after), self.middle]

    def _extra(self, encode: Encode, extra: Sequence[Extra]) -> list[int]:
        if not extra:
            return []
        tokens = [] if self.repository is None else [self.repository, *encode(PROJECT)]
        for each in extra:
            if self.file is None:
                tokens += encode(f"\n\n--- {each.name} ---\n\n")
            else:
                tokens += [self.file, *encode(f"{each.name}\n")]
            tokens += encode(each.text)
        return tokens if self.file is None else [*tokens, self.file, *encode(THIS_FILE)]


def find_markers(
    tokens: Sequence[str], candidates: Sequence[int], named: Mapping[str, int | None]
) -> GapMarkers | None:
    """`candidates`: ids whose text may name a marker. `named`: what the model's file says itself."""
    by_text = {tokens[id]: id for id in candidates}
    found = {
        part: next((id for id in (named.get(part), *(by_text.get(name) for name in names)) if id is not None), None)
        for part, names in NAMES.items()
    }
    if found["prefix"] is None or found["suffix"] is None or found["middle"] is None:
        return None
    return GapMarkers(**found)  # type: ignore[arg-type]
