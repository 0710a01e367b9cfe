"""Makes a tokenizer from the metadata of a GGUF file.

Contract: a missing key has llama.cpp's default. A wrong key is refused with its name. Non-goal: reading
the file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarn.errors import BadModel
from kvarn.settings import Settings
from kvarn.text import alphabet, infill
from kvarn.text.encoders import ByteLevel, Encoder, Markers, SentencePiece
from kvarn.text.pretokenizers import IGNORE_MERGES
from kvarn.text.vocabulary import Vocabulary, end_ids

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# llama.cpp matches these only when control tokens are asked for, even if the file does not mark them as control tokens.
_NAMES = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[
<|fim_prefix|> <fim-prefix> <fim_prefix> <PRE> \u2581<PRE> <|code_prefix|> <|prefix|>
<|fim_suffix|> <fim-suffix> <fim_suffix> <SUF> \u2581<SUF> <|code_suffix|> <|suffix|>
<|fim_middle|> <fim-middle> <fim_middle> <MID> \u2581<MID> <|code_middle|> <|middle|>
<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""
_CONTROL_BY_NAME = frozenset(_NAMES.split())
_FIM = {  # keys of the markers for filling in the middle, the older ones last
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
    "pad": ("fim_pad",),
    "repository": ("fim_rep",),
    "file": ("fim_sep",),
}


class _Keys(Settings):
    """Look-ups under tokenizer.ggml."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        super().__init__("the tokenizer", metadata, "tokenizer.ggml.")
        self.tokens = self.texts("tokens")
        if not self.tokens:
            raise self.bad("tokens", "a list with a token")

    def numbers(self, name: str, dtype: Any, kinds: str, default: float) -> NDArray[Any]:
        given = self.optional_numbers(name, len(self.tokens), kinds)
        if given is None:
            return np.full(len(self.tokens), default, dtype)
        with np.errstate(over="ignore"):  # a number beyond the range becomes infinite
            return given.astype(dtype)

    def id(self, name: str, default: int | None = None) -> int | None:
        key = f"{name}_token_id"
        value = self.values.get(self.prefix + key)
        id = default if value is None else value
        if id is None:
            return None
        if isinstance(id, bool) or not isinstance(id, int | np.integer):
            raise self.bad(key, "a whole number")
        # Converters write -1, signed or unsigned, for "none".
        return int(id) if 0 <= id < len(self.tokens) else None


def _ids(kinds: NDArray[Any], *wanted: int) -> frozenset[int]:
    return frozenset(np.flatnonzero(np.isin(kinds, wanted)).tolist())


def _markers(tokens: Sequence[str], kinds: NDArray[Any], model_name: str) -> Markers:
    by_name = frozenset(id for id, token in enumerate(tokens) if token in _CONTROL_BY_NAME)
    ids = sorted(_ids(kinds, CONTROL, UNKNOWN, USER_DEFINED) | by_name)
    texts = [tokens[id] for id in ids]
    always = [int(kinds[id]) == USER_DEFINED and id not in by_name for id in ids]
    # Phi-3 was trained without the line breaks that its template has after control tokens.
    phi3 = any(name in model_name.lower() for name in ("phi-3", "phi3"))
    strips = [phi3 and text not in ("<unk>", "<s>", "<|endoftext|>") for text in texts]
    return Markers(texts, ids, always, strips)


def _infill_markers(keys: _Keys, kinds: NDArray[Any]) -> infill.GapMarkers | None:
    named = {
        part: next((id for key in names if (id := keys.id(key)) is not None), None) for part, names in _FIM.items()
    }
    return infill.find_markers(keys.tokens, sorted(_ids(kinds, CONTROL, UNKNOWN, USER_DEFINED)), named)


def read(metadata: Mapping[str, Any]) -> tuple[Vocabulary, Encoder]:
    keys = _Keys(metadata)
    model = keys.text("model", "")
    if model not in ("gpt2", "llama"):
        raise BadModel(f"tokenizer.ggml.model {model!r} is not implemented; there are gpt2, llama")
    is_spm = model == "llama"
    pre = keys.text("pre", "") or "default"
    tokens = keys.tokens
    kinds = keys.numbers("token_type", np.int64, "iu", NORMAL)
    name = Settings("the model", metadata, "general.").text("name", "")
    markers = _markers(tokens, kinds, name)
    space_prefix = is_spm and keys.flag("add_space_prefix", True)
    encoder: Encoder
    if is_spm:
        unknown = keys.id("unknown", 0)
        scores = keys.numbers("scores", np.float32, "iuf", 0.0)
        encoder = SentencePiece(tokens, scores, markers, space_prefix, -1 if unknown is None else unknown)
    else:
        encoder = ByteLevel(tokens, keys.texts("merges"), markers, pre)
    bos = keys.id("bos", 1 if is_spm else None)
    control = _ids(kinds, CONTROL, UNKNOWN)
    vocabulary = Vocabulary(
        tokens=tokens,
        spelled=alphabet.sentencepiece if is_spm else alphabet.byte_level,
        control=control,
        plain=_ids(kinds, USER_DEFINED),
        unused=_ids(kinds, UNUSED),
        bos_id=bos,
        eos_ids=end_ids(tokens, control, [keys.id("eos", 2 if is_spm else None), keys.id("eot"), keys.id("eom")]),
        add_bos=bos is not None and keys.flag("add_bos_token", is_spm or pre in IGNORE_MERGES),
        space_prefix="always" if space_prefix else "never",
        chat_template=Settings("the tokenizer", metadata, "tokenizer.").optional_text("chat_template"),
        markers=_infill_markers(keys, kinds),
    )
    return vocabulary, encoder
