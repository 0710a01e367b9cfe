"""Writes docs/formats.md from the JSON schemas in src/kvarn/cli/schemas.

    python scripts/formats.py

The schemas are the source: change a field there, run this, and commit both. A test compares them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCHEMAS = ROOT / "src" / "kvarn" / "cli" / "schemas"
PAGE = ROOT / "docs" / "formats.md"
ORDER = (
    "run",
    "bench",
    "bench-serve",
    "perplexity",
    "compare",
    "plan",
    "inspect",
    "strategies",
    "list",
    "snapshot",
    "snapshot-verify",
    "explain",
    "requests",
)
BEGINNING = """\
# JSON formats

What `--json` prints, and what the server's own endpoints return. Each format has a JSON schema
(draft 2020-12) in [src/kvarn/cli/schemas](../src/kvarn/cli/schemas), which is part of the installed
package. This page is made from the schemas by `scripts/formats.py`. Tests check the real output of
every command against its schema, and a field that the schema does not have is an error.

- With `--json` a command prints one object on standard output, and nothing else there. Errors are
  one line on standard error, with an exit status that is not 0.
- A number that is not finite is null.
- **Digits.** Times in milliseconds and seconds have three decimals, rates (`tok_s`, `gb_s`,
  `per_second`, `samples`) two, `share` and `spread` four, `ratio` three, but always at least three
  significant digits. Other fractions have six significant digits. Integers, `when` and
  `logprob` are exact.
- New versions may add fields. A field keeps its name and its meaning, or CHANGELOG.md says so.
- Fields without "optional" are always there.
- The examples are real output, shortened. Their times are no benchmark.

The answers of the OpenAI endpoints are in [serving.md](serving.md).
"""


def document() -> str:
    return "\n".join([BEGINNING, *(section(name) for name in ORDER)])


def section(name: str) -> str:
    schema = json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))
    lines = [f"## `{'`, `'.join(schema['title'].split(', '))}`", "", fill(schema["description"], 100), ""]
    lines += [
        f"Schema: [{name}.json](../src/kvarn/cli/schemas/{name}.json)",
        "",
        "| field | type | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| `{path}` | {kind} | {meaning} |" for path, kind, meaning in fields(schema, schema)]
    for example in schema["examples"]:
        lines += ["", "```json", compact(example), "```"]
    return "\n".join([*lines, ""])


def fields(schema: dict[str, Any], root: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Path, type and meaning of every field, also inside objects and lists."""
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        optional = "" if name in required else "optional: "
        yield prefix + name, kind_of(field), optional + field["description"]
        inner = field.get("items", field)
        yield from fields(inner, root, f"{prefix}{name}{'[]' if 'items' in field else ''}.")
    for option in schema.get("oneOf", ()):
        if "$ref" in option:
            yield from fields(root["$defs"][option["$ref"].rpartition("/")[2]], root, prefix)


def kind_of(field: dict[str, Any]) -> str:
    kinds = field["type"] if isinstance(field["type"], list) else [field["type"]]
    if "items" in field:
        return f"list of {field['items'].get('type', 'object')}s"
    if "x-keys" in field:
        return f"object: {field['additionalProperties']['type']} by {field['x-keys']}"
    return " or ".join(kinds)


def compact(value: Any) -> str:
    """Indented JSON, with lists of numbers on one line."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    found: list[str] = []
    for line in text.splitlines():
        inside = bool(found) and found[-1].count("[") > found[-1].count("]")
        if inside and line.strip().rstrip(",").replace(".", "", 1).lstrip("-").isdecimal():
            found[-1] += ("" if found[-1].endswith("[") else " ") + line.strip()
        elif inside and line.strip() in ("]", "],") and not found[-1].endswith("["):
            found[-1] += line.strip()
        else:
            found.append(line)
    return "\n".join(found)


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
