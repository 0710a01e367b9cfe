"""Hypothesis drives every configuration of the cache against the dictionary oracle, checking after each operation."""

import pytest
from fuzz import run
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support.book import CONFIGS, Book

from kvarn.cache.placements import PLACEMENTS
from kvarn.cache.strategy import STRATEGIES

TOKENS = st.integers(0, 2)  # few values, so that prefixes meet
CHOICE = st.integers(0, 10**6)
STEP = st.lists(st.tuples(CHOICE, st.lists(TOKENS, min_size=1, max_size=20)), min_size=1, max_size=5)


class CacheMachine(RuleBasedStateMachine):
    name = "paged"

    def __init__(self) -> None:
        super().__init__()
        self.book = Book(CONFIGS[self.name])
        self.next = 0

    def pick(self, choice: int) -> int:
        live = sorted(self.book.texts)
        return live[choice % len(live)]

    def has_live(self) -> bool:
        return bool(self.book.texts)

    def has_row(self) -> bool:
        return len(self.book.texts) < self.book.config.max_seqs

    @precondition(has_row)
    @rule(
        salt=st.sampled_from([b"", b"a"]),
        head=CHOICE,
        cut=CHOICE,
        rest=st.lists(TOKENS, min_size=1, max_size=40),
        most=st.sampled_from([0, 1, 99]),  # blocks that come from a tier
    )
    def open(self, salt: bytes, head: int, cut: int, rest: list[int], most: int) -> None:
        texts = [*self.book.ended, *(text.tokens for text in self.book.texts.values())]
        known = texts[head % len(texts)] if texts else []
        self.next += 1
        self.book.open(self.next, salt)
        tokens = (known[: cut % (len(known) + 1)] + rest)[: self.book.config.context]
        self.book.recall(self.next, tokens, most)
        self.book.adopt(self.next, tokens)

    @precondition(has_live)
    @rule(choices=STEP)
    def step(self, choices: list[tuple[int, list[int]]]) -> None:
        self.book.step(self.batch(choices))

    @precondition(has_live)
    @rule(choices=STEP, commit=st.booleans(), drop=st.booleans())
    def flight(self, choices: list[tuple[int, list[int]]], commit: bool, drop: bool) -> None:
        """Commit what waits for it, or launch another step first, or lose that step."""
        if commit:
            for seq in self.book.texts:
                self.book.commit(seq)
        elif drop:
            self.book.drop(self.batch(choices))
        else:
            self.book.step(self.batch(choices), commit=False)
            if not self.book.config.ahead:
                for seq in self.book.texts:
                    self.book.commit(seq)

    def batch(self, choices: list[tuple[int, list[int]]]) -> dict[int, list[int]]:
        batch = {}
        for choice, tokens in choices:
            seq = self.pick(choice)
            most = min(self.book.config.context - len(self.book.texts[seq].tokens), self.book.config.max_chunk)
            if most:
                batch[seq] = tokens[:most]
        return batch

    @precondition(has_live)
    @rule(choice=CHOICE, cut=CHOICE)
    def rewind(self, choice: int, cut: int) -> None:
        seq = self.pick(choice)
        self.book.rewind(seq, cut % (self.book.texts[seq].committed + 1))

    @precondition(lambda self: self.has_live() and self.has_row())
    @rule(choice=CHOICE)
    def fork(self, choice: int) -> None:
        self.next += 1
        self.book.fork(self.pick(choice), self.next)

    @precondition(has_live)
    @rule(choice=CHOICE)
    def free(self, choice: int) -> None:
        self.book.free(self.pick(choice))

    @precondition(has_live)
    @rule(choice=CHOICE)
    def misuse(self, choice: int) -> None:
        self.book.misuse(self.pick(choice))

    @invariant()
    def holds(self) -> None:
        self.book.check()


@pytest.mark.requirement(33, 35)
@pytest.mark.parametrize("name", CONFIGS)
def test_random_verbs_against_the_dictionary_oracle(name: str) -> None:
    machine = type("Machine", (CacheMachine,), {"name": name})
    effort = settings(
        max_examples=25,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    run_state_machine_as_test(machine, settings=effort)


@pytest.mark.requirement(35)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_short_fuzzer_run_finds_nothing(name: str) -> None:
    """A short run of `make fuzz`, so that the tool itself is tested."""
    run(name, seed=0, ops=300)


def test_every_placement_is_driven() -> None:
    assert {STRATEGIES[config.strategy].placement for config in CONFIGS.values()} == set(PLACEMENTS)
