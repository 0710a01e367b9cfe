"""`kvarn completion`: bash runs its script; the scripts of zsh and fish name what the parsers have."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvarn.cli import COMMANDS, main, parser_of
from kvarn.loading.catalogue import MODELS

COLONS = ("mill:2b", "mill:10b", "mill-big:10b")  # bash and zsh split words at colons


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("scripts")
    code = """
import contextlib, sys
from pathlib import Path
from kvarn.cli import main
from kvarn.loading.catalogue import MODELS
for name in sys.argv[2:]:
    MODELS[name] = MODELS["smollm2"]
for shell in ("bash", "zsh", "fish"):
    with Path(sys.argv[1], shell).open("w") as file, contextlib.redirect_stdout(file):
        assert main(["completion", shell]) == 0
"""
    subprocess.run([sys.executable, "-c", code, str(folder), *COLONS], check=True, timeout=60)
    return {path.name: path for path in folder.iterdir()}


TYPED = {  # the words of the line, the last one incomplete: what completes it
    ("r",): ["run", "rm"],
    ("--v",): ["--version"],
    ("run", "--cache-"): ["--cache-type", "--cache-type-k", "--cache-type-v", "--cache-bytes", "--cache-layout"],
    ("run", "--js"): ["--json", "--json-schema"],
    ("run", "--cache-type", ""): ["f32", "f16", "bf16", "int8", "int6", "int4"],
    ("run", "--cache", "=", "pa"): ["paged"],
    ("run", "--cache-type", "="): ["f32", "f16", "bf16", "int8", "int6", "int4"],
    ("run", "-m", "s"): [*(name for name in MODELS if name.startswith("s")), "some text.txt"],
    ("run", "mill"): [*COLONS],
    ("run", "mill", ":"): ["2b", "10b"],
    ("run", "mill", ":", "1"): ["10b"],
    ("run", "-m", "mill-big", ":", "1"): ["10b"],
    ("run", "--model", "=", "mill", ":", "2"): ["2b"],
    ("run", "-n", "5", "some"): ["some text.txt"],
    ("run", "-f", "some"): ["some text.txt"],
    ("run", "-c", ""): [],
    ("serve", "mod"): ["model.gguf"],
    ("bench", "ser"): ["serve"],
    ("bench", "--against-python", "mod"): ["model.gguf"],
    ("bench", "serve", "--ra"): ["--rate"],
    ("bench", "--ra"): [],
    ("completion", ""): ["bash", "zsh", "fish"],
    ("help", "per"): ["perplexity"],
    ("help", "b"): ["bench"],
    ("help", "bench", ""): ["serve"],
    ("rm", "mill-"): ["mill-big:10b"],
    ("rm", "mill", ":", "1"): ["10b"],
    ("bench", "--cache", "pa"): ["paged"],
    ("bench", "--cache", "paged,ri"): ["paged,ring"],
    ("bench", "--cache", "=", "paged,ri"): ["paged,ring"],
    ("bench", "--cache-type", "f16,"): ["f16,f32", "f16,f16", "f16,bf16", "f16,int8", "f16,int6", "f16,int4"],
    ("nosuch", ""): [],
}


def test_bash_completes(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "some text.txt").touch()
    (tmp_path / "--js.txt").touch()  # not offered among options
    lines = [f"source {scripts['bash']}"]
    for words in TYPED:
        lines.append(f"COMP_WORDS=(kvarn {shlex.join(words)}); COMP_CWORD={len(words)}; COMPREPLY=(); _kvarn")
        lines.append("(( ${#COMPREPLY[@]} )) && printf '%s\\n' \"${COMPREPLY[@]}\"; echo .")
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    answers = [answer.splitlines() for answer in done.stdout.split(".\n")[:-1]]
    assert [sorted(each) for each in answers] == [sorted(each) for each in TYPED.values()]


def test_bash_knows_the_function(scripts: dict[str, Path]) -> None:
    line = f"source <(cat {scripts['bash']}); complete -p kvarn"
    done = subprocess.run(["bash", "--norc", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.stdout == "complete -F _kvarn kvarn\n"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_every_command_and_option_is_in_the_script(shell: str, scripts: dict[str, Path]) -> None:
    text = scripts[shell].read_text()
    for command in COMMANDS:
        if shell == "zsh":
            start = text.index(f"\n        {shlex.quote(command)})\n")
            part = text[start : text.index("&& return ;;", start)]
            names = set(re.findall(r"\)?(?:\)|\*|')(--?[a-z-]+)=?\[", part))
        else:
            part = "".join(line for line in text.splitlines(True) if f"'__kvarn_is \"{command}\"'" in line)
            flags = re.findall(r" -([slo]) ([a-z-]+)", part)
            names = {("--" if kind == "l" else "-") + name for kind, name in flags}
        if command != "help":
            assert names == set(parser_of(command)._option_string_actions), command
    assert "f32 f16 bf16 int8 int6 int4" in text
    assert all(name in text.replace("\\:", ":") for name in (*MODELS, *COLONS))


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_quotes_are_closed(shell: str, scripts: dict[str, Path]) -> None:
    """Apostrophes in help texts do not break the lines."""
    lines = [line.removesuffix("\\") for line in scripts[shell].read_text().splitlines()]
    if shell == "fish":  # in its quotes, the apostrophe is escaped
        lines = [line.replace("\\'", "") for line in lines]
    assert len([line for line in lines if not line.startswith("#") and shlex.split(line)]) > 100


def test_how_to_install_it(capsys: pytest.CaptureFixture) -> None:
    assert main(["completion", "--help"]) == 0
    help = capsys.readouterr().out
    assert "kvarn completion bash > ~/.local/share/bash-completion/completions/kvarn" in help
