"""The Python API: a model, its tokenizer and an engine.

    from kvarn import LLM, SamplingParams
    llm = LLM("smollm2", cache="paged")
    print(llm.generate("The quick brown fox")[0].text)

This layer takes and returns text; the engine works on token ids. Any number of threads may use one LLM,
and several streams may be read at the same time: all unfinished requests are computed together
(`kvarn.jobs.runner`).
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast, overload

from kvarn.arrays import Floats
from kvarn.backends import AUTO
from kvarn.backends.base import Backend, Memory
from kvarn.backends.cache_settings import cache_config
from kvarn.backends.choice import Opening
from kvarn.backends.loaded import load
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import Plan
from kvarn.cache.prefix import common
from kvarn.chats.answer import ToolCall
from kvarn.chats.chats import Chats
from kvarn.chats.tools import NO_TOOLS, Tools, ToolUse, tool_use
from kvarn.engine.config import EngineConfig
from kvarn.engine.engine import Engine
from kvarn.engine.params import SamplingParams, chat_defaults, with_settings
from kvarn.engine.recall import NO_TIERS
from kvarn.errors import KvarnError
from kvarn.jobs.batch import Messages, OneOrEach, ids_of, is_one_conversation, messages_of, paired, prompts_of
from kvarn.jobs.job import SILENT, Completion, Job, Listener, Output, TokenLogprob
from kvarn.jobs.pieces import BatchStream, Piece, Stream, one_answer
from kvarn.jobs.question import Question, questions_of
from kvarn.jobs.runner import Runner
from kvarn.jobs.together import outputs_of, run_all, start_all
from kvarn.lasting.fingerprint import Fingerprint, fingerprint_of
from kvarn.lasting.settings import tier_settings
from kvarn.lasting.snapshot import Facts
from kvarn.lasting.weights import Weights
from kvarn.loading.catalogue import DEFAULT_MODEL
from kvarn.loading.checkpoint import Checkpoint, open_checkpoint
from kvarn.loading.own_pooling import own_pooling
from kvarn.loading.own_sampling import own_sampling
from kvarn.loading.paths import user_path
from kvarn.loading.progress import Progress, quiet
from kvarn.loading.pull import resolve
from kvarn.models.families import graph_of
from kvarn.snapshots import Restored, Snapshots, answer_of
from kvarn.text.chat import ChatTemplate
from kvarn.text.quoting import Quotes, Quoting, Unquoted
from kvarn.text.tokenizer import Prompt, Tokenizer

__all__ = ["LLM", "BatchStream", "Completion", "Job", "Output", "Piece", "Stream", "TokenLogprob", "ToolCall"]


class LLM:
    """A loaded model.

    model                   a name (`smollm2`), a .gguf file, a folder with safetensors, or
                            hf:org/repo[/file.gguf]
    cache                   a cache strategy; `kvarn strategies` lists them
    cache_type              number type of stored keys and values: f32, f16, bf16, int8, int6, int4, or K/V: int8/int4
    cache_layout            order of the bytes in a block; None takes the backend's
    cache_bytes             memory for keys and values; None takes what max_seqs full contexts need, or on a
                            device with memory of its own what is left there
    host_cache              bytes of host memory for blocks that the cache evicts; None: evicted blocks are lost
    disk_cache              folder for evicted blocks, DIR or DIR:BYTES (default 10G): a restart finds them again
    block_size              tokens per block: a power of two from 16
    window                  a token sees itself and the window - 1 tokens before it
    pinned                  the first tokens, this many, stay visible outside the window
    context                 most tokens of a prompt and its answer together; 0 for all that the model was trained
                            for. With the strategies ring and sinks, how many of the last tokens are seen
    max_seqs                most sequences that are computed at the same time
    max_batch_tokens        most tokens of a step
    threads                 threads that compute; None takes one per physical core. Without effect on cuda
    backend                 `cpu`, `cuda`, `reference` (NumPy, slow, the oracle), or an open Backend. `auto` takes
                            cuda if it can run the model, else cpu; `opened.facts` says why
    chunk_while_decoding    most prompt tokens of a step in which other sequences decode
    max_waiting             most requests in the queue
    trust_messages          recognize control tokens in the text of messages; by default they are plain text
    snapshot                a snapshot to begin with: its text need not be computed (docs/lasting.md)
    progress                called with (what, done, total) while the model is fetched and loaded
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        cache: str = "auto",
        cache_type: str = "bf16",
        cache_layout: str | None = None,
        cache_bytes: int | None = None,
        host_cache: int | None = None,
        disk_cache: str | Path | None = None,
        block_size: int | None = None,
        window: int | None = None,
        pinned: int | None = None,
        context: int | None = None,
        max_seqs: int = 8,
        max_batch_tokens: int = 512,
        threads: int | None = None,
        backend: str | Backend = AUTO,
        chunk_while_decoding: int | None = None,
        max_waiting: int | None = None,
        trust_messages: bool = False,
        snapshot: str | Path | None = None,
        progress: Progress = quiet,
    ) -> None:
        if not isinstance(model, str | Path) or not str(model):
            raise KvarnError(f"model is {model!r}: give a name, a path or hf:org/repo")
        self.name = str(model)
        engine = EngineConfig(max_batch_tokens, chunk_while_decoding, max_waiting)
        tiers = tier_settings(host_cache, disk_cache)
        cache = tiers.strategy(cache)
        opening = Opening(backend, threads, progress)  # before the model is fetched, so that a wrong name shows at once
        self.path = resolve(self.name, progress=progress)
        checkpoint = open_checkpoint(self.path)
        self.config = checkpoint.config
        self.weights = Weights(checkpoint)
        self.pooling = own_pooling(checkpoint)
        self.tokenizer = tokenizer_of(checkpoint)
        self.chat_defaults = chat_defaults(own_sampling(checkpoint))
        self.cache_config = config = cache_config(
            self.config,
            self.name,
            cache=cache,
            cache_type=cache_type,
            cache_layout=cache_layout,
            cache_bytes=cache_bytes,
            block_size=block_size,
            window=window,
            pinned=pinned,
            context=context,
            max_seqs=max_seqs,
            max_batch_tokens=max_batch_tokens,
        )
        self.opened = opening.finish(config, checkpoint)
        self.graph = graph_of(self.config, checkpoint.shapes)
        planned, memory, self.program = load(self.backend, checkpoint, self.graph, config, max_batch_tokens, progress)
        self.engine = Engine(
            self.program,
            memory,
            book := KVCache(planned),
            engine,
            self.tokenizer.eos_ids,
            self.tokenizer.vocab_size,
            tiers.open(book, memory, lambda: self._fingerprint(planned, progress).digest) if tiers else NO_TIERS,
        )
        self.runner = Runner(self.engine, self.tokenizer)
        self.trust_messages = trust_messages
        if snapshot is not None:
            self.load_snapshot(snapshot)

    @property
    def backend(self) -> Backend:
        return self.opened.backend

    @property
    def cache(self) -> KVCache:
        return self.engine.cache

    @property
    def fingerprint(self) -> Fingerprint:
        """What decides the bits of cells, beside tokens. The first call of a model's life reads its weights."""
        return self._fingerprint(self.cache.plan)

    def _fingerprint(self, plan: Plan, progress: Progress = quiet) -> Fingerprint:
        return fingerprint_of(self.weights.digest(progress), self.config, plan, self.backend)

    @property
    def memory(self) -> Memory:
        return self.engine.memory

    def __repr__(self) -> str:
        plan = self.cache.plan
        cache = f"{plan.strategy.name} {plan.codec.name}, {plan.max_seqs} x {plan.context} tokens"
        return f"LLM({self.name!r}, backend={self.backend.name!r}, cache={cache!r})"

    def generate(self, prompts: Prompt | Sequence[Prompt], params: OneOrEach = None, **settings: Any) -> list[Output]:
        """Continue each prompt (text, or token ids). All prompts are computed together. If one fails, its error is
        raised.

        `params` are for all prompts, or a list with one for each. `settings` are fields of SamplingParams
        by name: generate("Hi", max_tokens=3)."""
        pairs = paired(prompts_of(prompts), params, settings)
        return outputs_of(self.runner, [partial(self.start, prompt, chosen) for prompt, chosen in pairs])

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **settings: Any) -> Stream:
        """The text of one answer, piece by piece; `output` of the stream has the rest. Leaving the loop early cancels
        the request."""
        if len(prompts_of(prompt)) != 1:
            raise KvarnError("a stream has one prompt: use stream_batch for several")
        return self.stream_job(self.start(prompt, one_answer(with_settings(params, settings))))

    def stream_batch(
        self, prompts: Prompt | Sequence[Prompt], params: OneOrEach = None, **settings: Any
    ) -> BatchStream:
        """The answers to several prompts, computed together, as `Piece(prompt, sample, text)`."""
        pairs = paired(prompts_of(prompts), params, settings)
        jobs: list[Job] = []
        start_all(self.runner, [partial(self.start, *pair) for pair in pairs], jobs)
        return BatchStream(self.runner, jobs)

    @overload
    def chat(
        self, messages: Messages, params: SamplingParams | None = None, *, tools: Tools = (), **settings: Any
    ) -> Output: ...
    @overload
    def chat(
        self, messages: Sequence[Messages], params: OneOrEach = None, *, tools: Tools = (), **settings: Any
    ) -> list[Output]: ...
    def chat(
        self,
        messages: Any,
        params: Any = None,
        *,
        tools: Tools = (),
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Output | list[Output]:
        """Answer a conversation with the model's chat template: a text, or [{"role": "user", "content": "..."}].

        A list of conversations gives a list of outputs; they are computed together. Settings that are
        open take `chat_defaults`, so answers are drawn with the model's own temperature.

        tools                   functions that the model may call, as in OpenAI's API (docs/tools.md)
        tool_choice             none, auto, required or {"type": "function", "function": {"name": ...}}
        parallel_tool_calls     whether an answer may have several calls
        chat_template_kwargs    variables of the chat template, such as enable_thinking"""
        alone = is_one_conversation(messages)
        use = tool_use(tools, tool_choice, parallel_tool_calls)
        conversations = [messages] if alone else messages
        questions = self.questions(conversations, params, settings, use, chat_template_kwargs)
        outputs = outputs_of(self.runner, [partial(self.start_question, question) for question in questions])
        return outputs[0] if alone else outputs

    def questions(
        self,
        conversations: Sequence[Messages],
        params: OneOrEach,
        settings: Mapping[str, Any],
        use: ToolUse = NO_TOOLS,
        variables: Mapping[str, Any] | None = None,
    ) -> list[Question]:
        """Conversations that `start_question` can start."""
        numbers: list[Prompt] = [[] for _ in conversations]
        chosen = [self.for_chat(each) for _, each in paired(numbers, params, settings)]
        return questions_of(self.runner, self.chats, conversations, chosen, use, variables)

    def start_question(self, question: Question, conversation: Hashable = None, listener: Listener = SILENT) -> Job:
        """Queue the answer to a conversation; see `start`."""
        return question.start(self.runner, conversation, listener)

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Tools = (),
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Stream:
        """The answer to one conversation, piece by piece. The stream's `output` also has the reasoning and the tool
        calls; `parts()` has them as they come. The settings are those of `chat`."""
        chosen = one_answer(with_settings(params, settings))
        use = tool_use(tools, tool_choice, parallel_tool_calls)
        (question,) = self.questions([messages], chosen, {}, use, chat_template_kwargs)
        return self.stream_job(self.start_question(question))

    def for_chat(self, params: SamplingParams) -> SamplingParams:
        """Settings for a conversation: those that are open take `chat_defaults`."""
        return params.with_defaults(self.chat_defaults)

    def render(
        self, messages: Messages, tools: Tools = (), chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The token ids of a conversation, up to the start of the answer."""
        return self.chats.encode(*self.chats.prompt(messages_of(messages), tool_use(tools), chat_template_kwargs))

    @cached_property
    def chats(self) -> Chats:
        """Conversations with this model: prompts, tool calls and reasoning."""
        return Chats(self.tokenizer, self.template, self.template.render, self.quotes)

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

    def embed(self, prompts: Prompt | Sequence[Prompt], pooling: str | None = None) -> list[Floats]:
        """The vector of each prompt (text, or token ids), of length 1: its last hidden state (`last`), or the mean of
        all of them (`mean`). None takes what the model's file says, else `last`."""
        starts = [partial(self.start_embedding, prompt, pooling) for prompt in prompts_of(prompts)]
        return [job.vector() for job in run_all(self.runner, starts)]

    # -- snapshots ------------------------------------------------------------------------------------------------

    @cached_property
    def snapshots(self) -> Snapshots:
        return Snapshots(self.runner, self.tokenizer, lambda: self.fingerprint, self._short_name)

    @property
    def _short_name(self) -> str:
        """Without folders: a snapshot may go to other people."""
        return self.path.name if Path(self.name).exists() else self.name

    def save_snapshot(self, path: str | Path, text: Prompt | Messages | Output) -> Facts:
        """Write a snapshot: a prompt (text, or token ids), a conversation, or an output with its answer so far. What
        the cache does not have is computed first."""
        path = user_path(str(path))
        if isinstance(text, Output):
            return self.snapshots.save(path, *answer_of(text))
        if isinstance(text, str):
            return self.snapshots.save(path, self.tokenizer.encode(text))
        is_chat = len(text) > 0 and isinstance(text[0], Mapping)
        tokens = self.shared_by(cast("Messages", text)) if is_chat else ids_of(cast("Sequence[int]", text))
        return self.snapshots.save(path, tokens)

    def shared_by(self, messages: Messages) -> list[int]:
        """The token ids that conversations with this beginning share: of a system message alone, what comes before the
        first question; of other messages, all up to the start of the answer."""
        given = messages_of(messages)
        if given[-1]["role"] not in ("system", "developer"):
            return self.render(given)
        ours, other = (self.render([*given, {"role": "user", "content": text}]) for text in ("a", "b"))
        return ours[: common(ours, other)]

    def load_snapshot(self, path: str | Path) -> Restored:
        """Restore a snapshot, whole or not at all. Prompts that begin with its text reuse it. Raises BadSnapshot, with
        the reason, if it is damaged or was made with other weights, cells or arithmetic."""
        return self.snapshots.load(user_path(str(path)))

    def resume(self, path: str | Path, **settings: Any) -> Output:
        """Go on with the answer in a snapshot, with its seed and settings: the tokens are those that it would have had.
        The output has the whole answer. `max_tokens` counts new tokens."""
        job = self.snapshots.continued(user_path(str(path)), settings)
        self.runner.wait(job)
        return job.output()

    # -- jobs: a request with its text ---------------------------------------------------------------------------

    def start(
        self, prompt: Prompt, params: SamplingParams, conversation: Hashable = None, listener: Listener = SILENT
    ) -> Job:
        """Queue a prompt; `stream_job` runs it. Prompts of one `conversation` reuse its history in the cache."""
        text = prompt if isinstance(prompt, str) else None
        tokens = ids_of(prompt) if text is None else self.tokenizer.encode(text)
        return self.runner.add(tokens, params, conversation=conversation, listener=listener, text=text)

    def start_embedding(self, prompt: Prompt, pooling: str | None = None, listener: Listener = SILENT) -> Job:
        """Queue a prompt for its vector."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else ids_of(prompt)
        return self.runner.embed(tokens, pooling or self.pooling, listener=listener)

    def stream_job(self, job: Job) -> Stream:
        return Stream(self.runner, job)


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.folder is not None:
        return Tokenizer.from_folder(checkpoint.folder)
    return Tokenizer.from_gguf(checkpoint.metadata)
