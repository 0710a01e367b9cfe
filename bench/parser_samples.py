"""Runs kvarn's parser on the samples in the tests of vLLM's tool parsers and SGLang's detectors.

    KVARN_VLLM_TREE=VLLM KVARN_SGLANG_TREE=SGLANG python bench/parser_samples.py [--failures]

Each variable names a source tree; without it, its part is left out. The test files are read, never run: a sample is a
text that a test gives to a parser, with what the test then asserts about the number of calls, their names and their
arguments. Tests that compute their texts in other ways than joining literals are not read. docs/tools.md has the
results. The status is 1 if a difference is not explained below.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from peer_tests import Reader, Sample

from kvarn.dialect import Dialect
from kvarn.dialect.families import family_named

_GLM = family_named("glm")
_HY3 = Dialect(
    "hy3",
    form="tagged",
    section=("<tool_calls>", "</tool_calls>"),
    call=("<tool_call>", "</tool_call>"),
    name_end="<tool_sep>",
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
)
_FUNCTION = Dialect(
    "minicpm5",
    form="tagged",
    call=('<function name="', "</function>"),
    name_end='">',
    key=('<param name="', '">'),
    value=("", "</param>"),
)
_XLAM = Dialect("bare array", array=True, bare=True, reasoning=("<think>", "</think>"))
# The part of a test file's or a detector's name, and the dialect that find() gives to this model.
FORMATS: dict[str, Dialect] = {
    "hermes": family_named("hermes"),
    "qwen25": family_named("hermes"),
    "granite4": family_named("hermes"),
    "qwen3coder": family_named("qwen3-coder"),
    "seed_oss": family_named("seed"),
    "glm": _GLM,
    "poolside": _GLM,
    "minimax_m2": family_named("minimax"),
    "minicpm5": _FUNCTION,
    "hy_v3": _HY3,
    "llama3": family_named("llama3"),
    "llama4": family_named("llama4"),
    "pythonic": family_named("llama4"),
    "lfm2": family_named("lfm2"),
    "olmo3": family_named("olmo3"),
    "gemma4": family_named("gemma4"),
    "functiongemma": family_named("functiongemma"),
    "mistral": family_named("mistral"),
    "kimi_k2": family_named("kimi"),
    "kimik2": family_named("kimi"),
    "deepseekv31": family_named("deepseek-v3.1"),
    "deepseekv3_": family_named("deepseek-v3"),
    "deepseekv3d": family_named("deepseek-v3"),
    "granite_tool": family_named("granite"),
    "phi4": family_named("phi4"),
    "longcat": family_named("longcat"),
    "internlm2": family_named("internlm"),
    "jamba": family_named("tool-calls"),
    "hunyuan_a13b": family_named("tool-calls"),
    "cohere": family_named("command"),
    "xlam": _XLAM,
    "gptoss": family_named("harmony"),
}

# Where kvarn differs on purpose: file, test, reason. A test that is not named is meant with all others of its file.
EXPLAINED: dict[tuple[str, str], str] = {
    ("gemma4", "test_incomplete_tool_call"): "a call that is cut off is no call",
    ("glm47", "test_namespace_tool_call_round_trip_to_responses_output"): "the server renames the call, not the parser",
    ("llama3", "test_extract_tool_calls_simple"): "a call without a marker counts only at the beginning of the answer",
    ("llama3", "test_extract_tool_calls_multiple_json_with_surrounding_text"): "the same",
    ("llama3", "test_extract_tool_calls_missing_parameters_and_arguments_key"): "no arguments are {}",
    ("minicpm5", ""): "repairs for one model: CDATA, lost spaces, wrapped arguments, other names of tools",
    ("phi4mini", ""): "functools[...] is not what the template of Phi-4-mini writes",
    ("qwen3coder", "test_extract_tool_calls_missing_closing_parameter_tag"): "a value ends at its end marker only",
    ("xlam", ""): "markers of other models, and code fences",
    ("poolside", "test_arg_key_without_value_emits_empty_call"): "a key without a value is malformed",
    ("poolside", "test_orphan_key_followed_by_new_key_uses_new_key"): "a key without a value is malformed",
}


def format_of(file: str, owner: str) -> Dialect | None:
    """By the detector that a test class makes, else by the file's name."""
    made = owner.lower()
    for part, dialect in FORMATS.items():
        if f"{part.replace('_', '')}detector()" in made:
            return dialect
    if "detector" in file and not owner:
        return None
    name = f"{file.removeprefix('test_')}_"
    return next((dialect for part, dialect in FORMATS.items() if part in name), None)


def as_written(sample: Sample) -> Sample:
    """With the dialect of the version that wrote the text."""
    name, text = sample.dialect.name, sample.text
    if name == "mistral" and "[ARGS]" not in text:
        array = "[TOOL_CALLS] [" in text or "[TOOL_CALLS][" in text
        return replace(sample, dialect=family_named("mistral-array") if array else replace(sample.dialect, name_end=""))
    if name == "granite" and "<tool_call>" in text:  # Granite 3.1
        return replace(sample, dialect=family_named("hermes"))
    return sample


def reason(sample: Sample) -> str:
    for (part, test), why in EXPLAINED.items():
        if part in sample.file and test in ("", sample.test):
            return why
    return ""


def main() -> None:
    folders = []
    if tree := os.environ.get("KVARN_VLLM_TREE"):
        folders.append(("vLLM", Path(tree) / "tests" / "tool_parsers"))
    if tree := os.environ.get("KVARN_SGLANG_TREE"):
        folders.append(("SGLang", Path(tree) / "test" / "registered" / "unit" / "function_call"))
    if not folders:
        sys.exit("set KVARN_VLLM_TREE or KVARN_SGLANG_TREE to a source tree")
    print("| project | tests | dialect | samples | equal | explained |\n|---|---|---|---|---|---|")
    failures: list[tuple[Sample, str]] = []
    for project, folder in folders:
        for path in sorted(folder.glob("test_*.py")):
            by_dialect: dict[str, list[Sample]] = {}
            for sample in map(as_written, Reader(path, format_of).samples()):
                by_dialect.setdefault(sample.dialect.name, []).append(sample)
            for dialect, samples in by_dialect.items():
                wrong = [(sample, why) for sample in samples if (why := sample.differs())]
                failures += wrong
                known = sum(bool(reason(sample)) for sample, _ in wrong)
                name = path.stem.removeprefix("test_").removesuffix("_tool_parser")
                print(f"| {project} | {name} | {dialect} | {len(samples)} | {len(samples) - len(wrong)} | {known} |")
    if "--failures" in sys.argv:
        for sample, why in failures:
            print(f"\n{sample.file} {sample.test}: {why} ({reason(sample) or 'not explained'})\n  {sample.text!r}")
    sys.exit(int(any(not reason(sample) for sample, _ in failures)))


if __name__ == "__main__":
    main()
