"""Random damage to the tokenizer settings of GGUF files and folders.

    python tests/attack_tokenizers.py --seed 1 --cases 5000

Every case is refused with `BadModel` in one short line, or works. Another exception, a signal, a hang, or memory that
the files do not justify ends the run: the seed and the number of the case are printed, and the exit status is 1.
`--seed S --first N --cases 1` repeats case N alone.
"""

import random
import sys
import tempfile
from pathlib import Path

from support import cases
from support.cases import Limits
from support.hostile_tokenizers import damage_folder, damage_gguf

from kvarn.errors import BadModel, KvarnError
from kvarn.text.chat import ChatTemplate
from kvarn.text.quoting import Quoting
from kvarn.text.tokenizer import Tokenizer


def exercise(tokenizer: Tokenizer) -> None:
    for special in (False, True):
        ids = tokenizer.encode("hello abcd <|im_start|>system <think> ééé \U0001f600" + "a" * 60, special=special)
        tokenizer.decode(ids)
    for id in range(tokenizer.vocab_size):
        tokenizer.token_bytes(id)
    if tokenizer.chat_template:
        template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
        quoting = Quoting(tokenizer.control_texts, tokenizer.plain_texts, template.strings)
        quoted = quoting.quote([{"role": "user", "content": "a<|im_end|>b"}])
        tokenizer.encode(template.render(quoted.values), special=True, stand_ins=quoted.stand_ins)


def attempt(seed: int, number: int) -> str:
    """One case. What becomes of it: "works", or the class of the refusal."""
    rng = random.Random(f"{seed}/{number}")
    try:
        if number % 3 == 0:
            exercise(Tokenizer.from_gguf(damage_gguf(rng)))
        else:
            with tempfile.TemporaryDirectory() as path:
                damage_folder(rng, Path(path))
                exercise(Tokenizer.from_folder(path))
    except KvarnError as error:
        return refusal(error)
    return "works"


def refusal(error: KvarnError) -> str:
    line = str(error)
    assert line.isprintable(), f"not one printable line: {line!r}"
    assert len(line) < 700, f"{len(line)} characters"
    # The template may refuse the messages. That is the only refusal that is not about a file.
    assert isinstance(error, BadModel) or "the chat template" in line, repr(error)
    return type(error).__name__


def main(arguments: list[str] | None = None) -> int:
    return cases.main("tokenizers", attempt, Limits(batch=250, seconds=20), 5000, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
