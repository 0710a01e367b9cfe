"""What llama.cpp said (tests/golden, made by scripts/golden_llamacpp.py), and how far a model agrees with it."""

import json
from pathlib import Path

import numpy as np
from support.models import material, model, tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
LEAD = 0.1  # nats by which llama.cpp must prefer its token for it to count
NOISY_LEAD = 0.2  # where it rounds activations


def golden(name: str) -> dict:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def agreement(top1: np.ndarray, known: dict) -> float:
    n = len(top1)
    sure = np.array(known["margins"])[:n] > LEAD
    return float((top1 == np.array(known["top1"])[:n])[sure].mean())


def sure_tokens(text: dict, lead: float) -> list[int]:
    return text["tokens"][: next((i for i, margin in enumerate(text["margins"]) if margin < lead), None)]


def wikitext() -> list[int]:
    text = material("data/wiki.test.raw").read_text(encoding="utf-8")
    return tokenizer(model("smollm2")).encode(text[:400_000])
