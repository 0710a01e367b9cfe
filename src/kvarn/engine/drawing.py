"""The next tokens of a step: the device samples the rows that it can, and the others come to the host."""

from collections.abc import Container, Sequence
from itertools import islice
from typing import NamedTuple

from kvarn.arrays import Floats
from kvarn.backends.base import Draw, Logits
from kvarn.engine.constraint import FREE
from kvarn.engine.request import Sample
from kvarn.engine.sampling import History, Sampled, bad_logits, likeliest_token, make_report
from kvarn.engine.scheduler import Work
from kvarn.engine.stats import EngineStats

Drawn = tuple[list[Sample], list[Sampled] | Exception]
DEVICE = "device"
NOT_FINITE = {-1: float("nan"), -2: float("inf"), -3: float("-inf")}


class _Row(NamedTuple):
    """The rows of logits that one sample has in a step."""

    work: Work
    rows: range  # of the wanted rows
    samples: list[Sample]  # whose next token is drawn from the last row; none in the middle of a prompt
    scores: bool  # whether rows report log-probabilities of the prompt
    where: str  # DEVICE, or the reason why the host samples


class Drawing:
    """The draws of a launched step. The device has those that it can do."""

    def __init__(self, order: Sequence[Work], logits: Logits, n_tokens: int, ahead: int = 0) -> None:
        """`ahead`: tokens that each sample will have by then and that are not known yet."""
        self._rows = _find(order, logits.samples)
        self._logits, self._n_tokens = logits, n_tokens
        draws = [draft for row in self._rows if row.where == DEVICE for draft in _drafts(row, ahead)]
        self._read = logits.sample(draws, n_tokens) if draws else list

    @property
    def leads_on(self) -> bool:
        """Whether the next step can name all tokens of this one: they are on the device."""
        return self._logits.latest and all(row.where == DEVICE for row in self._rows)

    def tokens(self, stats: EngineStats, dropped: Container[Sample] = ()) -> list[Drawn]:
        """The next token of each sample whose known tokens are all computed. Waits for the device.

        At the end of a prompt, these are the first tokens of all samples of the request. An exception in a
        sampler or a constraint is returned in place of the tokens and fails only that request. Dropped samples get
        no token."""
        needed = [row for row in self._rows if row.where != DEVICE]
        at = [place for row in needed for place in (row.rows if row.scores else row.rows[-1:])]
        rows = dict(zip(at, self._logits.rows(at)[:, : self._n_tokens], strict=True)) if at else {}
        tokens = iter(self._read())
        drawn: list[Drawn] = []
        for row in self._rows:
            given = list(islice(tokens, len(row.samples))) if row.where == DEVICE else []
            if row.work.sample in dropped:
                continue
            samples = row.samples
            stats.sampled[row.where] += len(samples)
            row.work.sample.request.sampled[row.where] += len(samples)
            result: list[Sampled] | Exception
            try:
                if row.scores:
                    _score_prompt(row.work, [rows[place] for place in row.rows])
                result = list(map(_reported, given)) if row.where == DEVICE else _on_host(row, rows)
                for sample, sampled in zip(samples, result, strict=True):
                    if sample.constraint is not FREE:
                        sample.complete = sample.constraint.complete([*sample.output, sampled.token])
            except Exception as error:  # noqa: BLE001 (it fails this request only)
                result, samples = error, samples or [row.work.sample]
            if samples:
                drawn.append((samples, result))
        return drawn


class Launched(NamedTuple):
    """A step whose tokens are not read yet."""

    order: list[Work]  # the samples, in the order of the step
    drawing: Drawing
    dropped: set[Sample]  # samples that have ended since

    @property
    def live(self) -> list[Work]:
        return [each for each in self.order if each.sample not in self.dropped]


def _find(order: Sequence[Work], device_samples: bool) -> list[_Row]:
    """The samples of the step that have rows."""
    found, end = [], 0
    for work in order:
        end += work.n_rows
        if not work.n_rows:
            continue
        first = work.sample
        request, n_prompt = first.request, len(first.request.prompt)
        scores = request.params.prompt_logprobs is not None and first.computed < n_prompt - 1
        samples = [] if work.n < first.missing else [first]
        # Only the first time: after a preemption the sample still has its sampled tokens.
        if samples and first.index == 0 and len(first.tokens) == n_prompt:
            samples += [sample for sample in request.samples[1:] if sample.finish_reason is None]
        where = request.host_only or DEVICE
        if not device_samples:
            where = "backend"
        elif scores:
            where = "prompt_logprobs"
        elif any(sample.constraint is not FREE for sample in samples):
            where = "constraint"
        found.append(_Row(work, range(end - work.n_rows, end), samples, scores, where))
    return found


def _history(sample: Sample) -> History:
    return History(sample.tokens, len(sample.request.prompt))


def _drafts(row: _Row, ahead: int) -> list[Draw]:
    draft = row.work.sample.request.drafter
    return [draft(row.rows[-1], _history(sample), sample.index, ahead) for sample in row.samples]


def _reported(token: int) -> Sampled:
    if token < 0:
        raise bad_logits(NOT_FINITE[token])
    return Sampled(token, None, ())


def _on_host(row: _Row, rows: dict[int, Floats]) -> list[Sampled]:
    sampler, last = row.work.sample.request.sampler, rows[row.rows[-1]]
    return [sampler(last, _history(sample), sample.index, sample.constraint) for sample in row.samples]


def _score_prompt(work: Work, rows: Sequence[Floats]) -> None:
    """Report the log-probabilities of prompt tokens, row by row: one row of float64 at a time."""
    request, start = work.sample.request, work.sample.computed
    report = make_report(request.params.prompt_logprobs)
    known = request.prompt_logprobs
    for at in range(start + 1, min(start + work.n, len(request.prompt) - 1) + 1):
        if at == len(known) + 1:  # a step that is run again has rows that are known
            likeliest_token(rows[at - 1 - start])
            known.append(report(rows[at - 1 - start], request.prompt[at]))
