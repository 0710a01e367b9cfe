"""Tokenizers from folders: the tokens that the same vocabulary gives from GGUF, and the files beside tokenizer.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from support import models
from support.hard_texts import hard_texts
from support.vocabularies import bpe
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers

from kvarn.errors import KvarnError
from kvarn.text.detokenizer import Detokenizer
from kvarn.text.tokenizer import Tokenizer

TEXTS = [text for text in hard_texts(seed=3, count=500) if text.isascii()]


def save(path: Path, library: tokenizers.Tokenizer, **files: Any) -> Path:
    library.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def byte_level(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    vocab = {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [token for token, type in zip(vocab, types, strict=True) if type == 3]
    library.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return library


def derived_spm(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece as the library expresses it: every way to join two tokens into a third, the best score first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    vocab = {token: id for id, token in enumerate(tokens)}
    halves = [(id, token[:cut], token[cut:]) for token, id in vocab.items() for cut in range(1, len(token))]
    found = [(-scores[id], id, a, b) for id, a, b in halves if a in vocab and b in vocab]
    merges = [(a, b) for _, _, a, b in sorted(found)]
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return library


def test_byte_level_agrees_with_gguf(tmp_path: Path) -> None:
    metadata = models.gguf_metadata(models.material("data/tokenizer/ggml-vocab-gpt-2.gguf"))
    both = Tokenizer.from_folder(save(tmp_path, byte_level(metadata))), Tokenizer.from_gguf(metadata)
    for text in hard_texts(seed=3, count=500):
        for special in (False, True):
            ids, expected = (tokenizer.encode(text, bos=False, special=special) for tokenizer in both)
            assert ids == expected
            assert both[0].decode(ids, special=True) == text


def test_sentencepiece_agrees_with_gguf(tmp_path: Path) -> None:
    """The library and the native code are two implementations of one rule: each is the other's oracle."""
    metadata = models.gguf_metadata(models.material("data/tokenizer/ggml-vocab-llama-spm.gguf"))
    both = Tokenizer.from_folder(save(tmp_path, derived_spm(metadata))), Tokenizer.from_gguf(metadata)
    for text in hard_texts(seed=3, count=500):
        for special in (False, True):
            ids, expected = (tokenizer.encode(text, bos=False, special=special) for tokenizer in both)
            assert ids == expected
            assert both[0].decode(ids, special=True) == text


def test_the_files_beside_it_name_special_tokens(tmp_path: Path) -> None:
    library = byte_level(bpe(("a b",), control=("<s>", "<|im_end|>", "<x>", "<y>")))
    config = {"bos_token": {"content": "<s>"}, "add_bos_token": True, "chat_template": "{{ bos_token }}"}
    names, generation = {"eos_token": "<x>"}, {"eos_token_id": [260, 259]}
    path = save(tmp_path, library, tokenizer_config=config, special_tokens_map=names, generation_config=generation)
    tokenizer = Tokenizer.from_folder(path)
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids) == (257, True, (259, 260, 258))
    assert (tokenizer.chat_template, tokenizer.vocab_size) == ("{{ bos_token }}", 261)
    assert tokenizer.encode("ab") == [257, 256]
    assert tokenizer.encode("<s>ab", special=True) == [257, 256]
    assert tokenizer.decode([257, 256]) == "ab"
    (path / "chat_template.jinja").write_text("newer")
    assert Tokenizer.from_folder(path).chat_template == "newer"


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_the_space_before_text_is_taken_away_as_it_was_put(tmp_path: Path, scheme: Any) -> None:
    """But this form puts no space before a space, so that " a" is "a": its encoding cannot tell them apart."""
    words = ["<unk>", "<s>", "▁", "a", "▁a"]
    model = tokenizers.models.BPE({word: id for id, word in enumerate(words)}, [("▁", "a")], unk_token="<unk>")
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    library.add_special_tokens(["<unk>", "<s>"])
    tokenizer = Tokenizer.from_folder(save(tmp_path, library, tokenizer_config={"bos_token": "<s>"}))
    for text in ("a a", "a<s>a", "aa  a<s>"):
        ids = tokenizer.encode(text, bos=True, special=True)
        detokenizer = Detokenizer(tokenizer)
        assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == text.replace("<s>", "")


def test_a_folder_that_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvarnError, match=r"no tokenizer.json in .*: download it"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(KvarnError, match=r"tokenizer.json is not JSON \(.*\); download it again"):
        Tokenizer.from_folder(tmp_path)
    save(tmp_path, tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")))
    with pytest.raises(KvarnError, match="holds a WordLevel model, which is not implemented; there is BPE"):
        Tokenizer.from_folder(tmp_path)
    save(tmp_path, byte_level(bpe()), tokenizer_config=[])
    with pytest.raises(KvarnError, match=r"tokenizer_config.json is not a JSON object"):
        Tokenizer.from_folder(tmp_path)


def test_dropout_is_for_training(tmp_path: Path) -> None:
    """A tokenizer.json may ask for merges that are left out at random."""
    library = byte_level(bpe())
    plain = Tokenizer.from_folder(save(tmp_path, library))
    expected = [plain.encode(text) for text in TEXTS]
    library.model.dropout = 0.9
    dropping = Tokenizer.from_folder(save(tmp_path, library))
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["dropout"] == pytest.approx(0.9)
    assert [dropping.encode(text) for text in TEXTS] == expected
