"""Measures llama.cpp, in the interpreter that has llama-cpp-python. Imports nothing of kvarn.

Reads one JSON object per line and answers each with one:

    {"model", "threads", "chunk"}                                                 ->  {"engine"}      (first)
    {"op": "prepare", "setting": {"type", "flash"}, "context", "depth", "batch"}  ->  {}
    {"op": "measure", "kind", "n"}                                                ->  {"tokens", "seconds"}

The answer to a request that fails is {"error"}. Tokens are random and not sampled. This favours llama.cpp
a little, because only llama_decode and the filling of its batch are measured.
"""

import ctypes
import json
import os
import random
import sys
import time
from typing import Any

import llama_cpp as lib  # type: ignore[import-not-found]

TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}  # ggml's numbers
N_BATCH = 2048  # llama.cpp's default: tokens per llama_decode


class Context:
    """One llama_context, with `batch` sequences of `depth` tokens each."""

    def __init__(self, model: Any, threads: int, chunk: int, setting: dict[str, Any], batch: int, context: int) -> None:
        params = lib.llama_context_default_params()
        params.n_ctx = -(-context // 256) * 256 * batch
        params.n_batch, params.n_ubatch = max(N_BATCH, batch), chunk
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = TYPES[setting["type"]]
        params.flash_attn_type = int(setting["flash"])
        params.kv_unified = False  # separate cells per sequence: llama.cpp's default, and faster in a batch
        params.no_perf = True
        self.batch = batch
        self.depth = 0
        self.raw = lib.llama_init_from_model(model, params)
        if not self.raw:
            raise RuntimeError(f"llama.cpp refuses the setting {setting}")
        self.memory = lib.llama_get_memory(self.raw)
        self.tokens = lib.llama_batch_init(params.n_batch, 0, 1)
        self.most = params.n_batch
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self.random = random.Random(1)

    def go_to(self, depth: int) -> None:
        """Compute the first sequence. The others are copies of it, in separate cells."""
        for seq in range(self.batch):
            lib.llama_memory_seq_rm(self.memory, seq, min(depth, self.depth), -1)
        if depth <= self.depth:
            self.depth = depth
            return
        for seq in range(1, self.batch):
            lib.llama_memory_seq_rm(self.memory, seq, -1, -1)
        self.decode([(0, pos, False) for pos in range(self.depth, depth)])
        for seq in range(1, self.batch):
            lib.llama_memory_seq_cp(self.memory, 0, seq, -1, -1)
        self.depth = depth

    def measure(self, kind: str, n: int) -> dict[str, float]:
        start = time.perf_counter()
        if kind == "pp":
            self.decode([(seq, self.depth + i, i == n - 1) for seq in range(self.batch) for i in range(n)])
        else:
            for i in range(n):
                self.decode([(seq, self.depth + i, True) for seq in range(self.batch)])
        seconds = time.perf_counter() - start
        for seq in range(self.batch):
            lib.llama_memory_seq_rm(self.memory, seq, self.depth, -1)
        return {"tokens": n * self.batch, "seconds": seconds}

    def decode(self, entries: list[tuple[int, int, bool]]) -> None:
        """Decode random tokens at these (sequence, position, whether logits are needed)."""
        tokens = self.tokens
        for at in range(0, len(entries), self.most):
            part = entries[at : at + self.most]
            for i, (seq, pos, wanted) in enumerate(part):
                tokens.token[i] = self.random.randrange(self.vocab_size)
                tokens.pos[i], tokens.n_seq_id[i], tokens.logits[i] = pos, 1, wanted
                tokens.seq_id[i][0] = seq
            tokens.n_tokens = len(part)
            if status := lib.llama_decode(self.raw, tokens):
                raise RuntimeError(f"llama_decode answered {status}")

    def close(self) -> None:
        lib.llama_batch_free(self.tokens)
        lib.llama_free(self.raw)


class Worker:
    def __init__(self, model: str, threads: int, chunk: int) -> None:
        lib.llama_backend_init()
        self.threads, self.chunk = threads, chunk
        self.model = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self.context: Context | None = None
        self.key: object = None

    def prepare(self, setting: dict[str, Any], context: int, depth: int, batch: int) -> dict[str, Any]:
        key = (tuple(setting.items()), context, batch)
        if key != self.key:
            if self.context:
                self.context.close()
            self.context, self.key = None, None
            self.context = Context(self.model, self.threads, self.chunk, setting, batch, context)
            self.key = key
        assert self.context
        self.context.go_to(depth)
        self.context.measure("tg", 2)  # warm up, and let llama.cpp run its delayed copies
        return {}

    def measure(self, kind: str, n: int) -> dict[str, float]:
        assert self.context
        return self.context.measure(kind, n)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the library's own output must not mix with the answers
    silent = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    worker: Worker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if worker is None:
                worker = Worker(request["model"], request["threads"], request["chunk"])
                answer: dict[str, Any] = {"engine": f"llama-cpp-python {lib.__version__}"}
            else:
                answer = getattr(worker, request.pop("op"))(**request)
        except Exception as error:  # noqa: BLE001 (the error is the answer)
            answer = {"error": f"{error}" or repr(error)}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
