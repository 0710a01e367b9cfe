"""`kvarn list`: the models on this machine, or the names that kvarn knows."""

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvarn.cli.manual import add_json_flag, describe
from kvarn.cli.table import print_json, print_table
from kvarn.errors import printable
from kvarn.loading.catalogue import MODELS, HubModel, quantization
from kvarn.loading.stored import Stored, stored_models
from kvarn.words import counted, file_size


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
List the models on this machine: those in the cache folder (KVARN_CACHE, default ~/.cache/kvarn) and
those in the cache of the Hugging Face library. The first column is what to type to run a model.""",
        """
kvarn list
kvarn list --all""",
    )
    parser.add_argument(
        "--all", action="store_true", help="list the names that kvarn knows; `kvarn pull` downloads them"
    )
    add_json_flag(parser)


def run(args: argparse.Namespace) -> None:
    models = stored_models()
    here = {model.name for model in models}
    if args.json:
        facts: dict[str, Any] = {"models": [facts_of(model) for model in models]}
        if args.all:
            facts["catalogue"] = [known(name, here) for name in MODELS]
        print_json(facts)
    elif args.all:
        rows = [known(name, here) for name in MODELS]
        lines = [
            (str(r["name"]), str(r["quantization"]), "yes" if r["here"] else "", origin(str(r["source"]))) for r in rows
        ]
        print_table(("name", "weights", "here", "from"), lines, left=4)
    elif models:
        print_table(("name", "family", "weights", "size", "modified"), [line_of(model) for model in models], left=3)
        print(f"\n{counted(len(models), 'model')}, {file_size(sum(model.bytes for model in models))}")
    else:
        print("no models are on this machine; `kvarn pull` downloads the default model, `kvarn list --all` shows names")


def facts_of(model: Stored) -> dict[str, object]:
    return {
        "name": model.name,
        "path": str(model.path),
        "bytes": model.bytes,
        "family": model.family,
        "quantization": model.quantization,
        "modified": datetime.fromtimestamp(int(model.modified), UTC).isoformat(),
    }


def known(name: str, here: set[str]) -> dict[str, object]:
    model = MODELS[name]
    source = f"hf:{model.repo}/{model.file}" if isinstance(model, HubModel) else f"package {model.wheel}"
    return {"name": name, "quantization": quantization(model.file), "source": source, "here": name in here}


def origin(source: str) -> str:
    """Short: the repository, or the package."""
    return "/".join(source.removeprefix("hf:").split("/")[:2])


def line_of(model: Stored) -> tuple[str, ...]:
    day = datetime.fromtimestamp(model.modified).strftime("%Y-%m-%d")
    name = model.name.replace(str(Path.home()), "~", 1) if model.name.startswith(f"{Path.home()}/") else model.name
    return (printable(name), model.family or "?", model.quantization or "", file_size(model.bytes), day)
