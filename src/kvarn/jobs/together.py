"""Several jobs that are computed together: if one is refused or fails, the others are cancelled."""

from collections.abc import Callable, Sequence

from kvarn.errors import KvarnError
from kvarn.jobs.job import Job, Output
from kvarn.jobs.runner import Runner


def start_all(runner: Runner, starts: Sequence[Callable[[], Job]], jobs: list[Job]) -> None:
    """Queue all prompts, as `jobs`. If one is refused, cancel the earlier ones."""
    try:
        for start in starts:
            jobs.append(start())
    except BaseException as error:
        _cancel(runner, jobs)
        if isinstance(error, KvarnError) and len(starts) > 1:
            error.args = (f"prompt {len(jobs)} of {len(starts)}, counted from 0: {error}",)
        raise


def run_all(runner: Runner, starts: Sequence[Callable[[], Job]]) -> list[Job]:
    """Start all and wait for all. If one fails, its error is raised and the others are cancelled."""
    jobs: list[Job] = []
    try:
        start_all(runner, starts, jobs)
        for job in jobs:
            runner.wait(job)
    finally:
        _cancel(runner, jobs)
    return jobs


def outputs_of(runner: Runner, starts: Sequence[Callable[[], Job]]) -> list[Output]:
    return [job.output() for job in run_all(runner, starts)]


def _cancel(runner: Runner, jobs: Sequence[Job]) -> None:
    for job in jobs:
        runner.cancel(job)
