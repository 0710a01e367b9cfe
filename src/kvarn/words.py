"""Numbers with their nouns, for sentences that people read: "1 token", "2 tokens", "1,024 tokens".

Pure functions over text; nothing is imported.
Non-goals: bytes in readable units (cli/table.py), other languages.
"""


def counted(n: int, noun: str, plural: str | None = None) -> str:
    """`n` with its noun. `plural` is needed where it is not the noun with an s: counted(2, "query", "queries")."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"
