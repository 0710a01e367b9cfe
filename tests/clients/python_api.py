"""What kvarn's Python API says of the texts that a client scored; runs with kvarn's own Python.

    $KVARN_PYTHON tests/clients/python_api.py FOLDER <scored.json

Writes the model's tokenizer to FOLDER, in the format of the Hugging Face hub. Reads a list of [context,
continuation] and prints a list of [log-probability of the continuation, whether it is greedy]. A context of null
is the beginning of a text: the model's BOS token.
"""

import json
import sys
from pathlib import Path

from rows import MODEL
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvarn import LLM
from kvarn.loading.gguf import GGUFFile
from kvarn.loading.pull import resolve

CONTROL = 3  # of tokenizer.ggml.token_type


def write_tokenizer(folder: Path) -> None:
    """From the keys of the GGUF file: there is no hub here to fetch the model's own files from."""
    found = GGUFFile.open(resolve(MODEL)).metadata
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in found.items()}
    assert (keys["model"], keys["pre"]) == ("gpt2", "smollm"), "the splitting below is that of smollm"
    names = keys["tokens"]
    merges = [tuple(merge.split(" ")) for merge in keys["merges"]]
    made = Tokenizer(models.BPE({name: id for id, name in enumerate(names)}, merges))
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    made.pre_tokenizer = pre_tokenizers.Sequence(splits)
    made.decoder = decoders.ByteLevel()
    control = [name for name, kind in zip(names, keys["token_type"], strict=True) if kind == CONTROL]
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
    made.save(str(folder / "tokenizer.json"))
    ends = {f"{end}_token": names[keys[f"{end}_token_id"]] for end in ("bos", "eos")}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **ends}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def score(llm: LLM, context: str | None, continuation: str) -> tuple[float, bool]:
    encode = llm.tokenizer.encode
    before = [llm.tokenizer.bos_id] if context is None else encode(context)
    ids = before + encode(continuation) if context is None else encode(context + continuation)
    (output,) = llm.generate([ids], prompt_logprobs=1, max_tokens=1)
    found = output.prompt_logprobs[len(before) :]
    return sum(each.logprob for each in found), all(each.logprob == each.top[0][1] for each in found)


def main(folder: Path) -> None:
    pairs = json.load(sys.stdin)
    write_tokenizer(folder)
    with LLM(MODEL, context=2048) as llm:
        json.dump([score(llm, *pair) for pair in pairs], sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
