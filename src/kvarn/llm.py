"""The Python API: a model, its tokenizer and an engine.

    from kvarn import LLM, SamplingParams
    llm = LLM("smollm2", cache="paged")
    print(llm.generate("The quick brown fox")[0].text)

This layer takes and returns text; the engine works on token ids. Any number of threads may use one LLM,
and several streams may be read at the same time: all unfinished requests are computed together
(`kvarn.jobs.runner`).
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

from kvarn.backends import check_memory, open_backend
from kvarn.backends.base import Backend, Memory
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.engine.config import EngineConfig
from kvarn.engine.engine import Engine
from kvarn.engine.request import SamplingParams, with_settings
from kvarn.errors import KvarnError
from kvarn.jobs.job import SILENT, Completion, Job, Listener, Output, TokenLogprob
from kvarn.jobs.runner import Runner
from kvarn.loading.checkpoint import Checkpoint, open_checkpoint
from kvarn.loading.progress import Progress, quiet
from kvarn.loading.pull import resolve
from kvarn.models.config import ModelConfig
from kvarn.models.families import graph_of
from kvarn.text.chat import ChatTemplate
from kvarn.text.quoting import Quotes, Quoting, Unquoted
from kvarn.text.tokenizer import Prompt, Tokenizer

__all__ = ["LLM", "Completion", "Job", "Output", "TokenLogprob"]

DEFAULT_CONTEXT = 4096  # or the context of the model, if that is less


class LLM:
    """A loaded model.

    model                   a name (`smollm2`), a .gguf file, a folder with safetensors, or
                            hf:org/repo[/file.gguf]
    cache                   a cache strategy; `kvarn strategies` lists them
    cache_type              a codec
    context                 most tokens of a prompt and its answer together
    max_seqs                most sequences that are computed at the same time
    max_batch_tokens        most tokens of a step
    chunk_while_decoding    most prompt tokens of a step in which other sequences decode
    max_waiting             most requests in the queue
    trust_messages          recognize control tokens in the text of messages; by default they are plain text
    backend                 `cpu`, `reference` (NumPy, slow, the oracle), or an open Backend
    """

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
        trust_messages: bool = False,
        progress: Progress = quiet,
    ) -> None:
        engine = EngineConfig(max_batch_tokens, chunk_while_decoding, max_waiting)
        is_open = not isinstance(backend, str) and hasattr(backend, "load")
        self.backend: Backend = backend if is_open else open_backend(str(backend), threads)  # type: ignore[assignment]
        checkpoint = open_checkpoint(resolve(str(model), progress=progress))
        self.config = checkpoint.config
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
        if config.context > self.config.context:
            raise KvarnError(f"context {context}: {self.config.name} was trained for {self.config.context} tokens")
        planned = plan(config, self.backend.default_layout)
        check_memory(planned, self.backend)
        memory = self.backend.memory(planned)  # before loading the weights, so that a lack of memory shows at once
        graph = graph_of(self.config, checkpoint.shapes)
        self.program = self.backend.load(checkpoint, graph, max_batch_tokens, progress)
        self.engine = Engine(
            self.program, memory, KVCache(planned), engine, self.tokenizer.eos_ids, self.tokenizer.vocab_size
        )
        self.runner = Runner(self.engine, self.tokenizer)
        self.trust_messages = trust_messages

    @property
    def cache(self) -> KVCache:
        return self.engine.cache

    @property
    def memory(self) -> Memory:
        return self.engine.memory

    def __repr__(self) -> str:
        plan = self.cache.plan
        cache = f"{plan.strategy.name} {plan.codec.name}, {plan.max_seqs} x {plan.context} tokens"
        return f"LLM({self.config.name!r}, backend={self.backend.name!r}, cache={cache!r})"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **settings: Any,
    ) -> list[Output]:
        """Continue each prompt (text, or token ids). All prompts are computed together. If one fails, its error is
        raised.

        `params` are for all prompts, or a list with one for each. `settings` are fields of SamplingParams
        by name: generate("Hi", max_tokens=3)."""
        jobs: list[Job] = []
        try:
            for prompt, each in paired(prompts, params, settings):  # if one is refused, the earlier ones are cancelled
                jobs.append(self.start(prompt, each))
            for job in jobs:
                self.runner.wait(job)
        finally:
            for job in jobs:
                self.runner.cancel(job)
        return [job.output() for job in jobs]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **settings: Any) -> Iterator[str]:
        """The text of one completion, piece by piece. Leaving the loop early cancels the request."""
        yield from self.stream_job(self.start(prompt, with_settings(params, settings)))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **settings: Any
    ) -> Output:
        """Answer a conversation, [{"role": "user", "content": "..."}], with the model's chat template."""
        return self.generate(self.render(messages), params, **settings)[0]

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The token ids of a conversation, up to the start of the answer."""
        quoted = self.quotes.quote(messages)
        text = self.template.render(quoted.values)
        return self.tokenizer.encode(text, special=True, stand_ins=quoted.stand_ins)

    @cached_property
    def template(self) -> ChatTemplate:
        tokenizer = self.tokenizer
        return ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)

    def close(self) -> None:
        """Wait for the step under way and stop. Unfinished requests and later calls raise an error."""
        self.runner.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @cached_property
    def quotes(self) -> Quotes:
        """Quotes what `template` is given, so that only the template writes control tokens."""
        strings = self.template.strings
        if self.trust_messages:
            return Unquoted()
        return Quoting(self.tokenizer.control_texts, self.tokenizer.plain_texts, strings)

    # -- jobs: a request with its text ---------------------------------------------------------------------------

    def start(
        self, prompt: Prompt, params: SamplingParams, conversation: Hashable = None, listener: Listener = SILENT
    ) -> Job:
        """Queue a prompt; `stream_job` runs it. Prompts of one `conversation` reuse its history in the cache."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _ids(prompt)
        return self.runner.add(tokens, params, conversation=conversation, listener=listener)

    def stream_job(self, job: Job) -> Iterator[str]:
        text, done = job.texts[0], False
        try:
            while not done:
                self.runner.advance(lambda: job.done or text.ready)
                done = job.done  # read before `take`: no text is added after it is true
                if piece := text.take():
                    yield piece
            self.runner.wait(job)  # raises the error of a failed request
        finally:
            self.runner.cancel(job)


def context_of(config: ModelConfig, context: int | None) -> int:
    """The context to use. None: the default; 0: the longest that the model was trained for."""
    return min(config.context, DEFAULT_CONTEXT) if context is None else context or config.context


def paired(
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    settings: Mapping[str, Any],
) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its SamplingParams."""
    batch = _batch(prompts)
    if not isinstance(params, list | tuple):
        return [(prompt, each) for each in [with_settings(params, settings)] for prompt in batch]  # type: ignore[arg-type]
    if len(params) != len(batch):
        raise KvarnError(f"{len(batch)} prompts and {len(params)} params: give one for all, or one for each")
    return [(prompt, with_settings(each, settings)) for prompt, each in zip(batch, params, strict=True)]


def _batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one prompt or several."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not hasattr(prompts, "__len__"):
        raise KvarnError(f"a prompt is {type(prompts).__name__}: give text, token ids, or a list of such prompts")
    if len(prompts) and all(hasattr(prompt, "__len__") for prompt in prompts):
        return list(prompts)  # type: ignore[arg-type]
    return [_ids(prompts)]


def _ids(prompt: object) -> list[int]:
    """Token ids as integers. Nothing else is converted to an id."""
    try:
        if isinstance(prompt, bytes | bytearray):
            raise TypeError
        return [index(token) for token in prompt]  # type: ignore[attr-defined]
    except TypeError:
        raise KvarnError("the prompt has a token that is not an integer: give text or token ids") from None


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.folder is not None:
        return Tokenizer.from_folder(checkpoint.folder)
    return Tokenizer.from_gguf(checkpoint.metadata)
