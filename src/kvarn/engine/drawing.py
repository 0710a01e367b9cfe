"""The next tokens of a step: the device samples the rows that it can, and the others come to the host."""

from collections.abc import Container, Sequence
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

    def __init__(self, rows: list[_Row], logits: Logits, n_tokens: int) -> None:
        self._rows, self._logits, self._n_tokens = rows, logits, n_tokens
        self._all_on_device = all(row.where == DEVICE for row in rows)
        self._draw([draft for row in rows if row.where == DEVICE for draft in _drafts(row)])

    def _draw(self, draws: list[Draw]) -> None:
        self._draws = draws
        self._read = self._logits.sample(draws, self._n_tokens) if draws else list

    def next(self, rows: Sequence[int], logits: Logits) -> "Drawing":
        """The draws of the step after this one, which has only these rows. The tokens of this one are not known. Each
        row decodes, and its token is drawn on the device."""
        drawing = Drawing.__new__(Drawing)
        drawing._logits, drawing._n_tokens, drawing._all_on_device = logits, self._n_tokens, True
        same = len(rows) == len(self._rows)
        drawing._rows = self._rows if same else [_moved(self._rows[row], to) for to, row in enumerate(rows)]
        if same and all(row.work.sample.request.draws_alike for row in self._rows):
            drawing._draw(self._draws)
        else:
            drawing._draw([draft for row in drawing._rows for draft in _drafts(row, ahead=1)])
        return drawing

    @property
    def leads_on(self) -> bool:
        """Whether the next step can name all tokens of this one: they are on the device."""
        return self._all_on_device and self._logits.latest

    def tokens(self, stats: EngineStats, dropped: Container[Sample] = ()) -> list[Drawn]:
        """The next token of each sample whose known tokens are all computed. Waits for the device.

        At the end of a prompt, these are the first tokens of all samples of the request. An exception in a
        sampler or a constraint is returned in place of the tokens and fails only that request. Dropped samples get
        no token."""
        rows = {} if self._all_on_device else self._rows_on_host()
        tokens, end = self._read(), 0
        drawn: list[Drawn] = []
        for row in self._rows:
            work, _, samples, _, where = row
            given, end = tokens[end : end + len(samples)], end + len(samples) * (where == DEVICE)
            if work.sample in dropped:
                continue
            stats.sampled[where] += len(samples)
            work.sample.request.sampled[where] += len(samples)
            result: list[Sampled] | Exception
            try:
                result = [_reported(token) for token in given] if where == DEVICE else _on_host(row, rows)
            except Exception as error:  # noqa: BLE001 (it fails this request only)
                result, samples = error, samples or [work.sample]
            if samples:
                drawn.append((samples, result))
        return drawn

    def _rows_on_host(self) -> dict[int, Floats]:
        """The logits that the device does not sample, by row."""
        needed = [row for row in self._rows if row.where != DEVICE]
        at = [place for row in needed for place in (row.rows if row.scores else row.rows[-1:])]
        return dict(zip(at, self._logits.rows(at)[:, : self._n_tokens], strict=True)) if at else {}


class Launched(NamedTuple):
    """A step whose tokens are not read yet."""

    order: list[Work]  # the samples, in the order of the step
    drawing: Drawing
    dropped: set[Sample]  # samples that have ended since
    ahead: bool = False  # it was launched before the tokens of the step before it were read

    @property
    def live(self) -> list[Work]:
        return [each for each in self.order if each.sample not in self.dropped] if self.dropped else self.order


def find_rows(order: Sequence[Work], device_samples: bool) -> list[_Row]:
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


def _moved(row: _Row, to: int) -> _Row:
    return row._replace(rows=range(to, to + 1))


def _drafts(row: _Row, ahead: int = 0) -> list[Draw]:
    """`ahead`: tokens that each sample will have by then and that are not known yet."""
    draft = row.work.sample.request.drafter
    return [draft(row.rows[-1], _history(sample), sample.index, ahead) for sample in row.samples]


def _reported(token: int) -> Sampled:
    if token < 0:
        raise bad_logits(NOT_FINITE[token])
    return Sampled(token, None, ())


def _on_host(row: _Row, rows: dict[int, Floats]) -> list[Sampled]:
    if row.scores:
        _score_prompt(row.work, [rows[place] for place in row.rows])
    sampler, last = row.work.sample.request.sampler, rows[row.rows[-1]]
    found = [sampler(last, _history(sample), sample.index, sample.constraint) for sample in row.samples]
    for sample, sampled in zip(row.samples, found, strict=True):
        if sample.constraint is not FREE:
            sample.complete = sample.constraint.complete([*sample.output, sampled.token])
    return found


def _score_prompt(work: Work, rows: Sequence[Floats]) -> None:
    """Report the log-probabilities of prompt tokens, row by row: one row of float64 at a time."""
    request, start = work.sample.request, work.sample.computed
    report = make_report(request.params.prompt_logprobs)
    known = request.prompt_logprobs
    for at in range(start + 1, min(start + work.n, len(request.prompt) - 1) + 1):
        if at == len(known) + 1:  # a step that is run again has rows that are known
            likeliest_token(rows[at - 1 - start])
            known.append(report(rows[at - 1 - start], request.prompt[at]))
