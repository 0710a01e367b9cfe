"""`kvarn snapshot make`: compute a text once and keep its cells in a file."""

import argparse
from contextlib import ExitStack

from kvarn.cli import flags
from kvarn.cli.manual import add_json_flag, describe
from kvarn.cli.parser import UsageError
from kvarn.cli.prefill import PrefillProgress
from kvarn.cli.prompt import RULE, add_prompt_flags, choose_model_and_prompt, read_prompt
from kvarn.cli.snapshot_inspect import facts_to_json, show
from kvarn.cli.table import print_json
from kvarn.loading.paths import user_path


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Compute a text and keep its keys and values in a file. `kvarn run`, `chat` and `serve` begin with it
(--snapshot FILE), and then do not compute it. With --system alone, the file has what all
conversations with this system message share.""",
        """
kvarn snapshot make --system-file rules.txt -o rules.kvs
kvarn snapshot make model.gguf -f book.txt -o book.kvs -c 0 --cache-type int8""",
        usage="[MODEL] [PROMPT] -o FILE [OPTIONS]",
    )
    words = parser.add_argument_group("text", RULE.split(" A pipe")[0])
    flags.add_model_flags(parser, tiers=False)
    add_prompt_flags(parser, words)
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the file to write, as in rules.kvs")
    parser.add_argument("--chat", action="store_true", help="put the text into the model's chat template")
    parser.add_argument("-sys", "--system", metavar="TEXT", help="the system message; implies --chat")
    parser.add_argument("--system-file", metavar="FILE", help="read the system message from a file")
    flags.add_chat_flags(parser)
    add_json_flag(parser)
    parser.set_defaults(settle=choose_model_and_prompt)


def run(args: argparse.Namespace) -> None:
    if args.system is not None and args.system_file is not None:
        raise UsageError("--system and --system-file were given: leave one out")
    system = args.system if args.system_file is None else flags.read_text(args.system_file)
    alone = system is not None and args.prompt is None and args.file is None
    prompt = "" if alone else read_prompt(args)
    llm = flags.load(args, args.trust_messages)
    messages = [] if system is None else [{"role": "system", "content": system}]
    if alone:
        tokens = llm.shared_by(messages)
    elif args.chat or messages:
        tokens = llm.render([*messages, {"role": "user", "content": prompt}])
    else:
        tokens = llm.tokenizer.encode(prompt)
    with ExitStack() as shown:
        watch = lambda job: shown.enter_context(PrefillProgress(job))  # noqa: E731
        facts = llm.snapshots.save(user_path(args.output), tokens, watch=watch)
    if args.json:
        print_json({"file": args.output, **facts_to_json(facts)})
    else:
        show(args.output, facts)
