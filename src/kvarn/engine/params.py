"""How to continue a prompt: the settings of a request, and the values of those that a caller leaves open.

There are two sets of defaults. A text is continued greedily, so the same call gives the same text. An
answer in a conversation is drawn with the model's own settings (`chat_defaults`). Non-goals: drawing a
token (sampling.py); names of flags and of HTTP fields.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

from kvarn.arrays import Doubles
from kvarn.errors import KvarnError
from kvarn.structured.structure import Structure, choice_of, grammar_of, regex_of, schema_of

UNBOUNDED = 1 << 30  # tokens: the context ends an answer first
LogitsProcessor = Callable[[list[int], Doubles], Doubles | None]

_OPEN = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # None: the default applies
_INTEGERS = ("max_tokens", "top_k", "n")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_STRUCTURES = {"json_schema": schema_of, "regex": regex_of, "choice": choice_of, "grammar": grammar_of}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt. None means the default of the method: docs/python.md has a table.

    max_tokens          most tokens of the answer
    temperature         divides the logits; 0 is greedy: always the most likely token
    top_k               draw from the k most likely tokens; 0 is off
    top_p               draw from the most likely tokens that have this probability together; 1 is off
    min_p               drop tokens with less than this share of the highest probability; 0 is off
    repetition_penalty  makes tokens of the prompt and the answer less likely; 1 is off
    presence_penalty    subtracted from the logits of tokens that the answer has; 0 is off
    frequency_penalty   subtracted once for each time that the answer has the token; 0 is off
    logit_bias          numbers that are added to the logits of these token ids; -100 forbids a token
    logits_processors   functions (tokens of the answer so far, float64 logits), called in order for every
                        token of every sample. They change the logits in place or return new ones
    seed                the same seed gives the same draws; None takes a random one
    stop                texts that end the answer; the answer ends before them
    stop_token_ids      token ids that end the answer
    ignore_eos          go on after the model's end token
    logprobs            report the log-probability of each token and of this many alternatives
    prompt_logprobs     the same for the tokens of the prompt. The prompt is then computed, not reused
    n                   number of answers (samples)
    json_schema         the answer is JSON of this schema: a dictionary, JSON text, or a class of pydantic
    regex               the whole answer matches this regular expression
    choice              the answer is one of these texts
    grammar             the answer follows this grammar, in Lark's syntax or in GBNF

    At most one of the last four may be given.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logits_processors: Sequence[LogitsProcessor] = ()
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    json_schema: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if callable(self.logits_processors):
            object.__setattr__(self, "logits_processors", (self.logits_processors,))
        self._check_types()
        self._check_ranges()
        _ = self.structure  # raises if it is wrong
        if self.seed is not None:
            object.__setattr__(self, "seed", int(self.seed))  # NumPy's integers overflow where Python's do not

    def with_defaults(self, defaults: Mapping[str, Any]) -> "SamplingParams":
        """Settings that are open take their value from `defaults`."""
        return replace(self, **{name: defaults[name] for name in _OPEN if getattr(self, name) is None})

    @property
    def structure(self) -> Structure | None:
        """What the answer must look like."""
        given = {name: getattr(self, name) for name in _STRUCTURES if getattr(self, name) is not None}
        if len(given) > 1:
            raise KvarnError(f"{' and '.join(given)} were given: an answer follows one of them, give only one")
        return next((_STRUCTURES[name](value, name) for name, value in given.items()), None)

    def _ensure(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise KvarnError(f"{name} is {getattr(self, name)!r}; it must be {rule}")

    def _check_types(self) -> None:
        ensure = self._ensure
        for names, kind, rule in ((_INTEGERS, Integral, "an integer"), (_NUMBERS, Real, "a number")):
            for name in names:
                value = getattr(self, name)
                is_open = name in _OPEN and value is None
                ensure(is_open or (isinstance(value, kind) and not isinstance(value, bool)), name, rule)
        for name in ("seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            ensure(isinstance(value, Integral | None) and not isinstance(value, bool), name, "an integer or None")
        ensure(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")
        bias = self.logit_bias
        ensure(isinstance(bias, Mapping), "logit_bias", "a dictionary of token ids and numbers")
        ensure(all(isinstance(each, Integral) for each in bias), "logit_bias", "a dictionary of token ids and numbers")
        ensure(all(isinstance(each, Real) for each in bias.values()), "logit_bias", "finite; -100 forbids a token")
        for name in ("stop", "stop_token_ids", "logits_processors"):
            given = getattr(self, name)
            ensure(isinstance(given, Collection) and not isinstance(given, str | bytes), name, "a list")
        ensure(all(isinstance(s, str) and s for s in self.stop), "stop", "strings that are not empty")
        ensure(all(isinstance(each, Integral) for each in self.stop_token_ids), "stop_token_ids", "a list of token ids")
        ensure(all(callable(each) for each in self.logits_processors), "logits_processors", "a list of functions")

    def _check_ranges(self) -> None:
        def within(name: str, holds: Callable[[Any], bool], rule: str) -> None:
            value = getattr(self, name)
            self._ensure(value is None or holds(value), name, rule)

        within("max_tokens", lambda v: v >= 1, "at least 1")
        within("temperature", lambda v: 0 <= v < math.inf, "0 (greedy) or more")
        within("top_k", lambda v: v >= 0, "0 (off) or more")
        within("top_p", lambda v: 0 < v <= 1, "above 0 and at most 1 (off)")
        within("min_p", lambda v: 0 <= v <= 1, "between 0 (off) and 1")
        within("repetition_penalty", lambda v: 0.01 <= v <= 100, "between 0.01 and 100; 1 is off")
        within("presence_penalty", lambda v: -2 <= v <= 2, "between -2 and 2")
        within("frequency_penalty", lambda v: -2 <= v <= 2, "between -2 and 2")
        within("logit_bias", lambda v: all(-1e30 <= b <= 1e30 for b in v.values()), "finite; -100 forbids a token")
        within("seed", lambda v: -(1 << 63) <= v < 1 << 64, "a 64-bit integer")
        within("logprobs", lambda v: 0 <= v <= 100, "between 0 and 100")
        within("prompt_logprobs", lambda v: 0 <= v <= 100, "between 0 and 100")
        within("n", lambda v: 1 <= v <= 128, "between 1 and 128")


TEXT_DEFAULTS: Mapping[str, Any] = {
    "max_tokens": 128,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def chat_defaults(own: Mapping[str, float]) -> Mapping[str, Any]:
    """For a conversation, with the model's own settings. A model's temperature of 0 does not count: greedy answers of
    small models repeat themselves."""
    usual = {"max_tokens": UNBOUNDED, "temperature": 0.7, "top_p": 0.95}
    drawn = {name: value for name, value in own.items() if name != "temperature" or value > 0}
    return {**TEXT_DEFAULTS, **usual, **drawn}


def with_settings(params: SamplingParams | None, settings: Mapping[str, Any]) -> SamplingParams:
    """`params`, or the defaults, with these settings changed."""
    if params is not None and not isinstance(params, SamplingParams):
        raise KvarnError(f"params is {type(params).__name__}: give SamplingParams, or settings by name (max_tokens=3)")
    known = [each.name for each in fields(SamplingParams)]
    for name in settings:
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise KvarnError(f"there is no setting {name!r}" + (f": did you mean {near[0]}?" if near else ""))
    return replace(params or SamplingParams(), **settings)
