"""A session against a plain list of tokens: whatever is done in whatever order, they agree.

The list model also knows which work is allowed: which places can be reached without evaluating, and
how many tokens have to be evaluated again elsewhere.
"""

from __future__ import annotations

import numpy as np
from drafting_fakes import DraftingModel
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from runtime_fakes import REWIND_TOKENS, FakeModel, expected_logits, fake_parts

from edgedsv4.config import SamplingOptions
from edgedsv4.errors import CancelledError, ContextFullError, NumericError
from edgedsv4.runtime.session import Session
from edgedsv4.runtime.stats import SyncReport

CAPACITY = 700
# Lengths that matter are named: left alone, hypothesis draws short lists and nothing is far back.
TOKENS = st.builds(
    lambda seed, count: np.random.default_rng(seed).integers(0, 11, count).tolist(),
    st.integers(0, 2**32),
    st.sampled_from([0, 1, 2, 5, 40, 127, 130, 200, 260]),
)
SHARES = st.sampled_from([0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 1.0])
FEW = st.lists(st.integers(0, 10), min_size=1, max_size=3)


class SessionMachine(RuleBasedStateMachine):
    """Rules are the calls of a user; `ids`, `marks` and `oldest` are the plain model."""

    model_type: type[FakeModel] = FakeModel
    draft = 0

    @initialize(chunk=st.sampled_from([1, 7, 64, 256]), window=st.sampled_from([1, 8, 40]))
    def open(self, chunk: int, window: int) -> None:
        config = FakeModel().config
        self.model = self.model_type(type(config)(**{**_fields(config), "window": window}))
        parts = fake_parts(self.model, prefill_chunk=chunk, draft=self.draft)
        self.session = Session(parts, capacity=CAPACITY)
        self.chunk = chunk
        self.ids: list[int] = []
        self.marks: set[int] = set()
        self.oldest = 0

    @property
    def floor(self) -> int:
        """Lowest length the rings can go back to."""
        return 0 if self.oldest == 0 else self.oldest + self.model.config.window - 1

    def expected_rebuild(self, target: int) -> int:
        """Tokens that going back to `target` has to evaluate again."""
        if target == 0 or target >= self.floor or {target, target + 1} & self.marks:
            return 0
        return target - self.restored(target)

    def gone_back(self, target: int) -> None:
        """The timeline was cut to `target`."""
        if target < len(self.ids):
            if target == 0:
                self.oldest = 0
            elif target < self.floor:
                self.oldest = max(0, self.restored(target) - self.model.config.window)
            self.marks = {mark for mark in self.marks if mark <= target}
        self.ids = self.ids[:target]
        self.grown()

    def grown(self) -> None:
        held = self.model.config.window + REWIND_TOKENS
        self.oldest = max(self.oldest, len(self.ids) - held)

    def restored(self, target: int) -> int:
        """The checkpoint from which `target` is reached, 0 for the start."""
        near = [mark for mark in self.marks if mark in (target, target + 1)]
        return min(near) if near else max((m for m in self.marks if m <= target), default=0)

    @rule(keep=SHARES, tail=TOKENS)
    def sync(self, keep: float, tail: list[int]) -> None:
        target = self.ids[: round(keep * len(self.ids))] + tail
        if len(target) > CAPACITY:
            target = target[-CAPACITY // 2 :]
        shared = _shared(self.ids, target)
        rebuilt = self.expected_rebuild(shared)
        report = self.session.sync(target)
        assert report == SyncReport(
            reused=shared - rebuilt, evaluated=len(target) - shared, rebuilt=rebuilt
        )
        self.gone_back(shared)
        self.ids = target
        self.grown()
        if len(target) - shared > 1:
            self.marks.add(len(target))

    @rule(share=SHARES)
    def rewind(self, share: float) -> None:
        count = round(share * len(self.ids))
        target = len(self.ids) - count
        rebuilt = self.expected_rebuild(target)
        report = self.session.rewind(count)
        assert report == SyncReport(reused=target - rebuilt, evaluated=0, rebuilt=rebuilt)
        self.gone_back(target)

    @precondition(lambda self: self.floor <= max(0, len(self.ids) - REWIND_TOKENS))
    @rule(count=st.integers(0, REWIND_TOKENS))
    def rewind_a_little(self, count: int) -> None:
        count = min(count, len(self.ids))
        report = self.session.rewind(count)
        assert report.rebuilt == report.evaluated == 0
        self.gone_back(len(self.ids) - count)

    @precondition(lambda self: self.marks)
    @rule(pick=SHARES)
    def rewind_to_a_turn(self, pick: float) -> None:
        marks = sorted(self.marks)
        target = marks[round(pick * (len(marks) - 1))]
        report = self.session.rewind(len(self.ids) - target)
        assert report == SyncReport(reused=target, evaluated=0, rebuilt=0)
        self.gone_back(target)

    @rule(token_ids=FEW, rows=st.sampled_from(["all", "last", "none"]))
    def evaluate(self, token_ids: list[int], rows: str) -> None:
        if len(self.ids) + len(token_ids) > CAPACITY:
            return
        got = self.session.evaluate(token_ids, logits=rows)  # type: ignore[arg-type]
        if rows == "all":
            assert got is not None
            for place, row in enumerate(got, start=len(self.ids) + 1):
                prefix = (self.ids + token_ids)[:place]
                np.testing.assert_array_equal(row, expected_logits(prefix))
        self.ids = self.ids + token_ids
        self.grown()

    @rule()
    def mark(self) -> None:
        self.session.mark_turn()
        if not self.ids or len(self.ids) > self.floor:
            self.marks.add(len(self.ids))

    @precondition(lambda self: self.ids and len(self.ids) < CAPACITY - 9)
    @rule()
    def generate(self) -> None:
        made = list(self.session.generate(SamplingOptions(temperature=0, max_tokens=9)))
        for token_id in made:
            assert token_id == int(np.argmax(expected_logits(self.ids)))
            self.ids = [*self.ids, token_id]
        self.settle()

    @precondition(lambda self: self.ids and len(self.ids) < CAPACITY - 9)
    @rule(count=st.integers(1, 8))
    def generate_and_give_up(self, count: int) -> None:
        """An iterator that is closed leaves the tokens it gave, whatever was evaluated ahead."""
        tokens = self.session.generate(SamplingOptions(temperature=0))
        for _ in range(count):
            assert next(tokens) == int(np.argmax(expected_logits(self.ids)))
            self.ids = [*self.ids, int(np.argmax(expected_logits(self.ids)))]
        tokens.close()
        self.settle()

    @precondition(lambda self: self.ids)
    @rule()
    def logits(self) -> None:
        np.testing.assert_array_equal(self.session.logits(), expected_logits(self.ids))
        self.settle()

    def settle(self) -> None:
        """Take over the reach, which evaluating the last token again may have changed."""
        self.oldest = self.session._live._cache.oldest
        assert self.floor <= len(self.ids)

    @rule(tail=TOKENS, stop_after=st.integers(0, 3), is_cancel=st.booleans())
    def fail(self, tail: list[int], stop_after: int, is_cancel: bool) -> None:
        """A sync that is cancelled, or breaks, in a later chunk keeps the chunks before it."""
        target = self.ids + tail
        stop_at = len(self.ids) + stop_after * self.chunk
        if len(target) > CAPACITY or len(target) <= stop_at:
            return
        if is_cancel:
            self.model.before_forward = lambda at: self.session.cancel() if at >= stop_at else None
        else:
            self.model.broken_position = stop_at
        try:
            self.session.sync(target)
        except (CancelledError, NumericError):
            pass
        else:
            raise AssertionError("the failure was swallowed")
        self.model.before_forward = lambda _position: None
        self.model.broken_position = None
        self.ids = target[:stop_at]
        self.grown()

    @rule()
    def overflow(self) -> None:
        try:
            self.session.sync([1] * (CAPACITY + 1))
        except ContextFullError:
            return
        raise AssertionError("too long a timeline was accepted")

    @invariant()
    def agrees_with_the_list(self) -> None:
        if not hasattr(self, "session"):
            return
        assert list(self.session.token_ids) == self.ids
        assert self.session.length == len(self.ids)
        assert set(self.session.turn_positions) == self.marks
        assert self.session._live._cache.rewind_floor == self.floor


def _shared(left: list[int], right: list[int]) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


def _fields(config: object) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__slots__}  # type: ignore[attr-defined]


class DraftingSessionMachine(SessionMachine):
    """The same user with drafts, right and wrong ones in turn."""

    model_type = DraftingModel
    draft = 3

    @rule(pattern=st.integers(0, 255))
    def change_drafts(self, pattern: int) -> None:
        self.model.is_right = lambda at: bool(pattern >> at % 8 & 1)


TestSessionState = SessionMachine.TestCase
TestSessionState.settings = settings(
    max_examples=250, stateful_step_count=30, deadline=None, derandomize=True
)
TestDraftingSessionState = DraftingSessionMachine.TestCase
TestDraftingSessionState.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, derandomize=True
)
