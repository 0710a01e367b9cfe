"""What people type: words without an option, wrong options and values, one name for each setting."""

import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest
from support.serving import tiny_model

from kvarn import LLM, SamplingParams
from kvarn.cache.codec import CODECS
from kvarn.cli import COMMANDS, flags, main, parser_of, split_command
from kvarn.cli.parser import Parser, UsageError
from kvarn.engine.params import UNBOUNDED

PARSED = [name for name in COMMANDS if name != "help"]


def parsed(*words: str, command: str = "run") -> tuple[str, str | None]:
    args = parser_of(command).parse(words)
    assert args is not None
    return args.model, getattr(args, "prompt", None)


MEANINGS = {  # words: the model, the prompt
    ("smollm2", "hello"): ("smollm2", "hello"),
    ("smollm2",): ("smollm2", None),
    ("The sea",): ("smollm2", "The sea"),
    ("The",): ("smollm2", "The"),
    ("hf:org/repo",): ("hf:org/repo", None),
    ("a.gguf",): ("a.gguf", None),
    ("a.gguf", "-"): ("a.gguf", "-"),
    ("./models/x", "hello"): ("./models/x", "hello"),
    ("my notes on a.gguf",): ("smollm2", "my notes on a.gguf"),
    ("here.txt",): ("here.txt", None),
    ("folder", "hello"): ("folder", "hello"),
    ("",): ("smollm2", ""),
    ("x" * 5000,): ("smollm2", "x" * 5000),
    ("-m", "a.gguf", "folder"): ("a.gguf", "folder"),
    ("-p", "text", "anything"): ("anything", "text"),
    ("smollm2", "-n", "5", "hello"): ("smollm2", "hello"),
    ("-n", "5", "hello"): ("smollm2", "hello"),
    ("smollm2", "--", "--hello"): ("smollm2", "--hello"),
    ("-p=-hello",): ("smollm2", "-hello"),
    ("- a list",): ("smollm2", "- a list"),
}


@pytest.mark.parametrize(("words", "meaning"), MEANINGS.items(), ids=lambda each: " ".join(map(str, each))[:30])
def test_words_are_a_model_and_a_prompt(
    words: tuple[str, ...], meaning: tuple[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "here.txt").touch()
    assert parsed(*words) == meaning


@pytest.mark.parametrize("command", ["chat", "serve", "bench", "perplexity", "inspect"])
def test_every_command_with_a_model_takes_it_as_a_word(command: str) -> None:
    assert parsed("a.gguf", command=command)[0] == "a.gguf"
    assert parsed(command=command)[0] == "smollm2"
    if command != "inspect":
        assert parsed("-m", "a.gguf", command=command)[0] == "a.gguf"
        assert "[MODEL]" in str(parser_of(command).usage)
        with pytest.raises(UsageError, match=r"the model is given twice, as 'a\.gguf' and with -m b"):
            parsed("a.gguf", "-m", "b", command=command)


def test_models_as_other_engines_have_them() -> None:
    for model in ("Qwen3", "qwen3:latest", "hf.xy/org/repo:Q4_K_M", "hf:org/repo"):
        assert parsed(model, "hello") == (model, "hello")
        assert parsed(model) == (model, None)
    assert parsed("org/repo", "hello") == ("org/repo", "hello")
    with pytest.raises(UsageError, match=r"there is no model 'either/or'.* -p either/or"):
        parsed("either/or")


WRONG = {  # what is typed: what follows `kvarn run: `
    "--promt hi": "there is no option --promt; did you mean --prompt? (kvarn run --help lists the options)",
    "-prompt hi": "there is no option -prompt; did you mean --prompt? (kvarn run --help lists the options)",
    "--promt=hi": "there is no option --promt; did you mean --prompt? (kvarn run --help lists the options)",
    "--tempera 1": "there is no option --tempera; did you mean --temperature? (kvarn run --help lists the options)",
    "--frob": "there is no option --frob (kvarn run --help lists the options)",
    "-c abc x": "-c is 'abc'; it must be a whole number",
    "--ctx-size abc x": "--ctx-size is 'abc'; it must be a whole number",
    "-cabc x": "-c is 'abc'; it must be a whole number",
    "--top-p much": "--top-p is 'much'; it must be a number",
    "--cache-bytes inf": "--cache-bytes is 'inf'; it must be a number of bytes, as in 500M or 2G",
    "--stop-token-ids 1,x": "--stop-token-ids is '1,x'; it must be token ids with commas between them, as in 1,2",
    "--cache-type int9": "--cache-type is 'int9'; it must be one of f32, f16, bf16, int8, int6, int4; "
    "did you mean int8?",
    "-c": "-c needs a value: -c N",
    "--cache-type": "--cache-type needs a value: --cache-type f32|f16|bf16|int8|int6|int4",
    "-p -hello": "-p needs a value: -p TEXT; a value that begins with - is written -p=-hello",
    "-p --json": "-p needs a value: -p TEXT",
    "--json=1": "--json takes no value",
    "a.gguf b c": "'c' is one word too many: put a text of several words in quotes",
    "hello world": "there is no model 'hello'; a prompt of several words needs quotes",
    "smolm2 hello": "there is no model 'smolm2'; did you mean smollm2?",
    "smolm2": "there is no model 'smolm2'; did you mean smollm2, smollm2:360m or smollm2:135m? "
    "(for a prompt of one word: -p smolm2)",
    "gpt-4o": "there is no model 'gpt-4o'; `kvarn list --all` shows the names (for a prompt of one word: -p gpt-4o)",
    "-ngl 99 x": "there is no option -ngl: all layers are on one device: --backend cuda or cpu selects it",
    "x --main-gpu 1": "there is no option --main-gpu: the environment variable CUDA_VISIBLE_DEVICES selects the device",
    "x --tensor-split 1,1": "there is no option --tensor-split: kvarn computes on one device; leave it out",
    "x -fa": "there is no option -fa: there is one attention, and it needs no option; leave it out",
    "x --max-model-len=9": "there is no option --max-model-len: use -c N",
    "--chatter x": "there is no option --chatter (kvarn run --help lists the options)",
    "a.gguf -- b -n 5": "everything after -- is text: put options before it, and put a text of several words in quotes",
    "-p a --echo --system b": "--echo prints a text and its continuation: leave it out with --chat",
    "--stop-token-ids=-1": "--stop-token-ids is '-1'; it must be token ids with commas between them, as in 1,2",
    "smollm2 -m a.gguf": "the model is given twice, as 'smollm2' and with -m (to continue this text, use -p)",
    "smollm2 hello -m b": "the model is given twice, as 'smollm2' and with -m b: leave one out",
    "smollm2 hello -p b": "the prompt is given twice, as 'hello' and with -p: leave one out",
    "smollm2 hello -f b": "the prompt is given twice, as 'hello' and with -f: leave one out",
    "-p a -f b": "give the prompt with -p TEXT, or with -f FILE, not both",
    "-p a --echo --chat": "--echo prints a text and its continuation: leave it out with --chat",
    "-p a --logprobs 2": "--logprobs needs --json",
}


@pytest.mark.parametrize(("line", "error"), WRONG.items(), ids=WRONG)
def test_a_wrong_command_line_gets_one_line(line: str, error: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["run", *line.split()]) == 2
    assert capsys.readouterr() == ("", f"kvarn run: {error}\n")


@pytest.mark.parametrize("word", ["llama3", "Llama", "qwen", "phi4", "deepseek-r1", "org/name", "qwen3:9b", "smollm"])
def test_a_word_that_looks_like_a_model_is_no_prompt(word: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["run", word]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvarn run: there is no model {word!r}; ")
    assert error.endswith(f" (for a prompt of one word: -p {word})\n")


@pytest.mark.parametrize(
    "word", ["hello", "Question:", "2024", "3.14", "1+1=", "don't", "well-known", "日本語", "/", ":"]
)
def test_other_words_are_prompts(word: str) -> None:
    assert word == "/" or parsed(word) == ("smollm2", word)


WRONG_COMMANDS = {
    "rnu": "kvarn: there is no command 'rnu'; did you mean run? (kvarn --help lists them)",
    "help rnu": "kvarn: there is no command 'rnu'; did you mean run? (kvarn --help lists them)",
    "-m x run": "kvarn: there is no option -m before a command: kvarn COMMAND [OPTIONS]",
    "bench serve --rate x": "kvarn bench serve: --rate is 'x'; it must be a number",
    "perplexity": "kvarn perplexity: give the text with -f FILE",
    "compare": "kvarn compare: give the text with -f FILE",
    "compare -f x --window 8,y": "kvarn compare: --window is '8,y'; give whole numbers with commas between them, "
    "as in 0,1024",
    "compare -f x --cache-type int7": "kvarn compare: --cache-type is 'int7'; it must be one of "
    f"{', '.join(CODECS)}; did you mean int8?",
    "compare -f x --plot x.png": "kvarn compare: --plot x.png: the picture is in SVG, so the name must end in .svg",
    "chat -s x": "kvarn chat: there is no option -s (kvarn chat --help lists the options)",
    "chat smollm2 hello": "kvarn chat: 'hello' is one word too many; usage: kvarn chat [MODEL] [OPTIONS]",
    "ls hello": "kvarn list: 'hello' is one word too many; usage: kvarn list [OPTIONS]",
    "bench -p abc": "kvarn bench: -p is 'abc'; give whole numbers with commas between them, as in 0,1024",
    "bench --cache ring,pagd": "kvarn bench: --cache is 'pagd'; it must be one of contiguous, head-major, repeated, "
    "ring, sliding, sinks, paged, auto; did you mean paged?",
    "strategies --heads 9": "kvarn strategies: --heads is '9'; give query heads / KV heads, as in 9/3",
    "bench serve --goodput x": "kvarn bench serve: --goodput x: give a measure and milliseconds, as in ttft:500 "
    "(ttft, tpot, e2e)",
    "list --max-model-len 9": "kvarn list: there is no option --max-model-len (kvarn list --help lists the options)",
    "completion": "kvarn completion: SHELL is missing (kvarn completion --help lists the options)",
    "completion tcsh": "kvarn completion: SHELL is 'tcsh'; it must be one of bash, zsh, fish",
}


@pytest.mark.parametrize(("line", "error"), WRONG_COMMANDS.items(), ids=WRONG_COMMANDS)
def test_wrong_commands(line: str, error: str, capsys: pytest.CaptureFixture) -> None:
    assert main(line.split()) == 2
    assert capsys.readouterr() == ("", f"{error}\n")


def test_help_of_a_command_has_two_forms(capsys: pytest.CaptureFixture) -> None:
    for command in PARSED:
        assert main([*command.split(), "--help"]) == 0
        help = capsys.readouterr().out
        assert help.startswith(f"usage: kvarn {command} ")
        assert main(["help", *command.split()]) == 0
        assert capsys.readouterr().out == help
    assert split_command(["help", "help"]) == ("help", ["--help"])


def test_an_alias_is_shown_once() -> None:
    help = " ".join(parser_of("run").format_help().split())
    assert "-c, --context N maximum tokens" in help
    assert help.count("--ctx-size") == 1
    assert "also --predict and --n-predict)" in help


def names_of(parser: Parser) -> dict[str, str]:
    """The main name of each option, by its destination."""
    return {
        action.dest: next(name for name in action.option_strings if name.startswith("--"))
        for action in parser._actions
        if action.option_strings
    }


NOT_IN_THE_COMMAND_LINE = {"n", "logit_bias", "logits_processors", "prompt_logprobs", "progress"}


def test_a_setting_has_one_name_in_python_and_in_the_command_line() -> None:
    names = names_of(parser_of("run")) | names_of(parser_of("serve"))
    settings = [each.name for each in fields(SamplingParams)]
    settings += list(inspect.signature(LLM).parameters)
    for setting in settings:
        if setting not in NOT_IN_THE_COMMAND_LINE:
            assert names[setting] == f"--{setting.replace('_', '-')}"
    assert set(settings) - names.keys() >= NOT_IN_THE_COMMAND_LINE


@pytest.mark.parametrize("command", PARSED)
def test_options_of_one_name_are_one_setting(command: str) -> None:
    """An option that has a setting's name or alias is that setting in every command."""
    run = {
        name: action.dest
        for name in ("run", "serve")
        for action in parser_of(name)._actions
        for name in action.option_strings
        if name.startswith("--")
    }
    odd = {("strategies", "--chunk"), ("strategies", "--seed"), ("bench serve", "--seed")}  # of other things
    for action in parser_of(command)._actions:
        for name in action.option_strings:
            if name in run and (command, name) not in odd:
                assert action.dest == run[name], name


def test_only_the_flags_that_are_given_reach_the_sampling_params() -> None:
    def params(*words: str) -> SamplingParams:
        args = parser_of("run").parse(words)
        assert args is not None
        return flags.sampling_params(args)

    assert params() == SamplingParams(max_tokens=128)
    given = "-n 5 --temp 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repeat-penalty 1.1 --presence-penalty 0.2 --seed 0"
    more = [
        "--frequency-penalty",
        "0.3",
        "--stop",
        "a",
        "--stop",
        "b",
        "--stop-token-ids",
        "7,8",
        "--ignore-eos",
        "--logprobs",
        "2",
    ]
    assert params(*given.split(), *more) == SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        seed=0,
        stop=["a", "b"],
        ignore_eos=True,
        logprobs=2,
        stop_token_ids=(7, 8),
    )
    assert params("-n", "-1").max_tokens == UNBOUNDED


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 512)


def test_the_echo_is_the_prompt_and_then_the_answer(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    answers = []
    for echo in ([], ["--echo"]):
        assert main(["run", str(tiny), "ab\ncd", "-n", "4", "--ignore-eos", *echo]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[1] == "ab\ncd" + answers[0]
    assert main(["run", str(tiny), "ab\ncd", "-n", "4", "--ignore-eos", "--echo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] + "\n" == answers[1]


def test_log_probabilities_are_in_the_json(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["run", str(tiny), "abc", "-n", "3", "--ignore-eos", "--json", "--logprobs", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["token"] for each in report["logprobs"]] == report["tokens"]
    for each in report["logprobs"]:
        assert len(each["top"]) == 2
        assert each["top"][0] == {"token": each["token"], "logprob": each["logprob"]}, "greedy"
