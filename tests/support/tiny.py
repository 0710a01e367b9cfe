"""Engines with tiny random models of every architecture, without a file."""

import random
from collections.abc import Callable, Sequence

import numpy as np
from support.null_backend import Null, NullProgram
from support.tiny_models import ENGINE

from kvarn.backends.base import Memory
from kvarn.backends.reference import Reference
from kvarn.backends.reference.program import ReferenceProgram
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.engine.config import EngineConfig
from kvarn.engine.engine import Engine
from kvarn.engine.params import SamplingParams
from kvarn.engine.recall import NO_TIERS, Tiers
from kvarn.graph.ops import Rope
from kvarn.models.config import ModelConfig
from kvarn.models.families import family_of, graph_of

LAYERS, HEADS, KV, DIM = ENGINE.n_layers, ENGINE.n_heads, ENGINE.n_kv_heads, ENGINE.head_dim
HIDDEN, FF, VOCAB, CONTEXT = ENGINE.hidden, ENGINE.feed_forward, ENGINE.vocab_size, ENGINE.context
_RNG = random.Random(1)
PROMPTS = [[_RNG.randrange(VOCAB) for _ in range(n)] for n in (1, 5, 33, 64, 100, 129)]
GREEDY = SamplingParams(max_tokens=20)
computing = True  # False: engines of the null backend


def config_of(architecture: str = "llama") -> ModelConfig:
    local = architecture == "gemma3"
    return ModelConfig(
        architecture=architecture,
        name=f"tiny {architecture}",
        n_layers=LAYERS,
        n_heads=HEADS,
        n_kv_heads=KV,
        head_dim=DIM,
        hidden=HIDDEN,
        feed_forward=FF,
        vocab_size=VOCAB,
        context=CONTEXT,
        norm_eps=ENGINE.norm_eps,
        rope=Rope(ENGINE.rope_base, DIM),
        windows=(ENGINE.window, ENGINE.window, None) if local else (None,) * LAYERS,
        local_rope=Rope(100.0, DIM) if local else None,
    )


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of the tensors that the architecture must have."""
    return {name: tensor.shape for name, tensor in family_of(config).tensors(config).items() if tensor.required}


def weights_of(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    stored = shapes_of(config)
    weights = {}
    for name in graph_of(config, stored).weights:
        shape = stored[name]
        if "norm" in name:
            weights[name] = (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32)
        else:
            weights[name] = (rng.standard_normal(shape) * (2.0 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5)).astype(
                np.float32
            )
    return weights


def program_of(architecture: str = "llama", seed: int = 0) -> ReferenceProgram:
    config = config_of(architecture)
    return ReferenceProgram(config, weights_of(config, seed))


def engine_of(
    program: ReferenceProgram | None = None,
    max_batch_tokens: int = 64,
    chunk_while_decoding: int | None = None,
    max_waiting: int | None = None,
    eos_ids: Sequence[int] = (),
    n_tokens: int | None = None,
    tiers: Callable[[KVCache, Memory], Tiers] = lambda cache, memory: NO_TIERS,
    **cache,
) -> Engine:
    backend = Reference() if computing else Null()
    program = program or (program_of() if computing else NullProgram(config_of()))
    settings = dict(context=CONTEXT, strategy="paged", codec="bf16", max_seqs=4, max_chunk=max_batch_tokens) | cache
    planned = plan(CacheConfig(layers=program.config.layer_specs, **settings))
    config = EngineConfig(max_batch_tokens, chunk_while_decoding, max_waiting)
    memory, book = backend.memory(planned), KVCache(planned)
    return Engine(program, memory, book, config, eos_ids, n_tokens, tiers(book, memory))


def finish(engine: Engine) -> None:
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
        assert steps < 10_000, "the engine does not come to an end"
    engine.cache.check()


def blocks_of_16(n: int) -> int:
    """Bytes of that many."""
    return n * plan(CacheConfig(program_of().config.layer_specs, 16, "paged", "bf16", block_size=16)).nbytes


def alone(prompt: list[int], params: SamplingParams = GREEDY, program=None) -> list[int]:
    engine = engine_of(program, max_batch_tokens=256, max_seqs=1, strategy="contiguous")
    request = engine.add(prompt, params)
    finish(engine)
    return request.samples[0].output
