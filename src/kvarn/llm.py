"""The Python API: a model, its tokenizer and an engine behind four lines.

    from kvarn import LLM, SamplingParams
    llm = LLM("smollm2", cache="paged")
    print(llm.generate("The quick brown fox")[0].text)

Text comes in and goes out here; underneath there are only token ids. Any number of threads may use one LLM, and streams
may be read side by side: all that is under way is computed together (`kvarn.jobs.runner`).
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from kvarn.backends import open_backend
from kvarn.backends.base import Backend, Memory
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.engine.config import EngineConfig
from kvarn.engine.engine import Engine
from kvarn.engine.request import SamplingParams
from kvarn.errors import KvarnError
from kvarn.jobs.job import Completion, Job, Output, TokenLogprob
from kvarn.jobs.runner import Runner
from kvarn.loading.checkpoint import Checkpoint, open_checkpoint
from kvarn.loading.progress import Progress, quiet
from kvarn.loading.pull import resolve
from kvarn.models.config import ModelConfig
from kvarn.models.families import graph_of
from kvarn.text.chat import ChatTemplate
from kvarn.text.tokenizer import Tokenizer

__all__ = ["LLM", "Completion", "Job", "Output", "TokenLogprob"]

DEFAULT_CONTEXT = 4096  # or what the model was trained for, if that is less

Prompt = str | Sequence[int]


class LLM:
    """A model ready to answer.

    `model` is a name (`smollm2`), a .gguf file, a folder with safetensors, or hf:org/repo[/file.gguf]. `cache` is a
    strategy (`kvarn strategies` lists them), `cache_type` a codec. `context` bounds prompt plus answer, `max_seqs` how
    many sequences are computed side by side, `max_batch_tokens` how many tokens a step computes at most, of which
    `chunk_while_decoding` may be a prompt's while others decode; `max_waiting` requests may wait for their turn.
    `backend` is `cpu`, `reference` for the slow oracle in NumPy, or an open one."""

    def __init__(
        self,
        model: str | Path = "smollm2",
        *,
        cache: str = "auto",
        cache_type: str = "bf16",
        cache_layout: str | None = None,
        cache_bytes: int | None = None,
        block_size: int | None = None,
        window: int | None = None,
        pinned: int | None = None,
        context: int | None = None,
        max_seqs: int = 8,
        max_batch_tokens: int = 512,
        threads: int | None = None,
        backend: str | Backend = "cpu",
        chunk_while_decoding: int | None = None,
        max_waiting: int | None = None,
        progress: Progress = quiet,
    ) -> None:
        engine = EngineConfig(max_batch_tokens, chunk_while_decoding, max_waiting)
        self.backend = open_backend(backend, threads) if isinstance(backend, str) else backend
        checkpoint = open_checkpoint(resolve(str(model), progress=progress))
        self.config = checkpoint.config
        if context is not None and context > self.config.context:
            raise KvarnError(f"context {context}: {self.config.name} was trained for {self.config.context} tokens")
        self.tokenizer = tokenizer_of(checkpoint)
        config = CacheConfig(
            layers=self.config.layer_specs,
            context=context_of(self.config, context),
            strategy=cache,
            codec=cache_type,
            layout=cache_layout,
            block_size=block_size,
            max_seqs=max_seqs,
            max_chunk=max_batch_tokens,
            window=window,
            pinned=pinned,
            cache_bytes=cache_bytes,
        )
        planned = plan(config, self.backend.default_layout)
        _check_memory(planned.nbytes, self.backend)
        memory = self.backend.memory(planned)  # before the weights: what does not fit is refused at once
        graph = graph_of(self.config, checkpoint.shapes)
        self.program = self.backend.load(checkpoint, graph, max_batch_tokens, progress)
        self.engine = Engine(self.program, memory, KVCache(planned), engine, self.tokenizer.eos_ids)
        self.runner = Runner(self.engine, self.tokenizer)

    @property
    def cache(self) -> KVCache:
        return self.engine.cache

    @property
    def memory(self) -> Memory:
        return self.engine.memory

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> list[Output]:
        """Continue each prompt (text, or token ids); all of them are computed together. If one fails through a fault,
        that is raised."""
        jobs: list[Job] = []
        try:
            for prompt in _batch(prompts):  # one that is refused takes those before it out of the queue
                jobs.append(self.start(prompt, params or SamplingParams()))
            for job in jobs:
                self.runner.wait(job)
        finally:
            for job in jobs:
                self.runner.cancel(job)
        return [job.output() for job in jobs]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one completion, piece by piece. Leaving the loop early frees what it held."""
        yield from self.stream_job(self.start(prompt, params or SamplingParams()))

    def chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None) -> Output:
        """Answer a conversation, [{"role": "user", "content": "..."}], in the model's own template."""
        return self.generate(self.render(messages), params)[0]

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The token ids of a conversation, ready for the answer."""
        return self.tokenizer.encode(self.template.render(messages), special=True)

    @cached_property
    def template(self) -> ChatTemplate:
        tokenizer = self.tokenizer
        return ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)

    # -- jobs: a request with its text ---------------------------------------------------------------------------

    def start(self, prompt: Prompt, params: SamplingParams, conversation: Hashable = None) -> Job:
        """Queue a prompt; `stream_job` runs it. Turns of one `conversation` keep its history in the cache."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return self.runner.add(tokens, params, conversation=conversation)

    def stream_job(self, job: Job) -> Iterator[str]:
        text, done = job.texts[0], False
        try:
            while not done:
                self.runner.advance(lambda: job.done or text.ready)
                done = job.done  # asked before the text is taken: nothing is written after it
                if piece := text.take():
                    yield piece
            self.runner.wait(job)  # for what made it fail
        finally:
            self.runner.cancel(job)


def context_of(config: ModelConfig, asked: int | None) -> int:
    """None: a common one; 0: all that the model was trained for."""
    return min(config.context, DEFAULT_CONTEXT) if asked is None else asked or config.context


def _check_memory(wanted: int, backend: Backend) -> None:
    memory = backend.memory_bytes
    if memory is not None and wanted > memory:
        raise KvarnError(
            f"keys and values would take {wanted / 2**30:.1f} GiB and this machine has {memory / 2**30:.1f} GiB of "
            "memory: lower the context (-c), the sequences at once (-np) or --cache-bytes"
        )


def _batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, text or ids, or several of them -> several."""
    if isinstance(prompts, str):
        return [prompts]
    several = [prompt for prompt in prompts if isinstance(prompt, str | Sequence)]
    return several if len(several) == len(prompts) else [[int(token) for token in prompts]]  # type: ignore[arg-type]


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.folder is not None:
        return Tokenizer.from_folder(checkpoint.folder)
    return Tokenizer.from_gguf(checkpoint.metadata)
