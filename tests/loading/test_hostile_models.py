"""Whole models with something wrong somewhere: they open, or are refused with `BadModel`; nothing else comes out."""

import json
import random

import numpy as np
import pytest
from support.tiny_files import gguf_keys, hf_settings, safetensors, write_gguf, write_hf
from support.tiny_models import ARCHITECTURES, weights

from kvarn.errors import BadModel
from kvarn.loading.checkpoint import open_checkpoint
from kvarn.loading.gguf import GGUFFile
from kvarn.loading.safetensors import SafetensorsFolder

ODD = [None, 0, 1, -1, 2, 3, 7, 2**31, 2**70, 0.0, 0.5, 1e300, -1e-300, True, False, "", "8", [], [1], {}, {"a": 1}]


def opens(path) -> bool:
    said = ""
    try:
        checkpoint = open_checkpoint(path)
    except BadModel as e:
        said = str(e)
    if said:
        assert said.isprintable()
        assert ";" in said, "what is wrong; what to do"
        return False
    for info in checkpoint.infos:
        assert checkpoint.tensor(info.name).shape == info.shape
    return True


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mutated_gguf(tmp_path, architecture):
    random_ = random.Random(architecture)
    path = write_gguf(tmp_path / "m.gguf", architecture)
    whole = path.read_bytes()
    header = min(info.offset for info in GGUFFile.open(path).tensors.values())
    opened = 0
    for _ in range(600):
        content = bytearray(whole)
        for _ in range(random_.choice((1, 1, 2))):
            content[random_.randrange(header)] = random_.choice((0, 1, 2, 255, random_.randrange(256)))
        path.write_bytes(content)
        opened += opens(path)
    assert 20 < opened < 580


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_odd_settings_in_config_json(tmp_path, architecture):
    folder = write_hf(tmp_path / "hf", architecture)
    known = hf_settings(architecture)
    extra = ["rope_scaling", "rope_parameters", "sliding_window", "layer_types", "sliding_window_pattern"]
    extra += ["text_config", "partial_rotary_factor", "use_sliding_window", "max_window_layers", "quantization_config"]
    opened = 0
    for key in [*known, *extra]:
        for odd in ODD:
            (folder / "config.json").write_text(json.dumps(known | {key: odd}))
            opened += opens(folder)
    for kind in ("linear", "llama3", "yarn"):
        for key in ("factor", "low_freq_factor", "original_max_position_embeddings", "rope_theta"):
            for odd in ODD:
                for place in ("rope_scaling", "rope_parameters"):
                    (folder / "config.json").write_text(json.dumps(known | {place: {"type": kind, key: odd}}))
                    opened += opens(folder)
    assert opened > 50


@pytest.mark.parametrize("kind", ["[u32", "[bool", "[f32", "[str", "[[u32"])
def test_lists_where_numbers_belong(tmp_path, kind):
    inner = ["a", "b"] if kind == "[str" else [[1], [2]] if kind == "[[u32" else [1, 0]
    for key in gguf_keys("gemma3"):
        for content in ([], inner):
            assert not opens(write_gguf(tmp_path / "m.gguf", "gemma3", keys={key: (kind, content)}))


@pytest.mark.parametrize("prefix", ["{x}.", "{0.y}.", "%s.", "{", ""])
def test_a_prefix_of_names_is_text_and_nothing_else(tmp_path, prefix):
    folder = write_hf(tmp_path / "hf", "phi3")
    plain = SafetensorsFolder.open(folder)
    stored = {name.replace("model.", prefix, 1): plain.load(name) for name in plain.tensors}
    (folder / "model.safetensors").write_bytes(safetensors(stored))
    assert opens(folder)


def test_mutated_safetensors(tmp_path):
    random_ = random.Random(5)
    folder = write_hf(tmp_path / "hf", "llama", weights("llama", tied=True), settings={"tie_word_embeddings": True})
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int(np.frombuffer(whole[:8], "<u8")[0])
    for _ in range(1000):
        content = bytearray(whole)
        content[random_.randrange(header)] = random_.choice((*b'09,:{}[]" ', random_.randrange(256)))
        file.write_bytes(content[: random_.choice((len(content), len(content), random_.randrange(len(content))))])
        opens(folder)
