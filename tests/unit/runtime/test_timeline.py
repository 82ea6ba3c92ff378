"""What a timeline evaluates, keeps and gives back, on a model that notices every lost row."""

from __future__ import annotations

import numpy as np
import pytest
from runtime_fakes import FakeModel, expected_logits

from edgedsv4.config import EngineOptions
from edgedsv4.errors import CancelledError, ConfigError, ContextFullError, NumericError
from edgedsv4.runtime.stats import SyncReport
from edgedsv4.runtime.timeline import Timeline

LONG = [i % 11 for i in range(400)]


class Rig:
    """A timeline with its model and the switches of its owner."""

    def __init__(
        self, capacity: int = 1000, chunk: int = 50, checkpoint_bytes: int = 1 << 20
    ) -> None:
        self.model = FakeModel()
        self.is_cancelled = False
        self.timeline = Timeline(
            self.model,  # type: ignore[arg-type]
            capacity=capacity,
            options=EngineOptions(prefill_chunk=chunk, checkpoint_bytes=checkpoint_bytes),
            check_files=lambda: None,
            should_stop=lambda: self.is_cancelled,
        )


@pytest.fixture
def rig() -> Rig:
    return Rig()


def assert_stands_at(timeline: Timeline, ids: list[int]) -> None:
    assert list(timeline.token_ids) == ids
    assert timeline.length == len(ids)
    if ids:
        np.testing.assert_array_equal(timeline.logits(), expected_logits(ids))


def test_sync_evaluates_everything_once_in_chunks(rig: Rig) -> None:
    report = rig.timeline.sync(LONG[:120])
    assert report == SyncReport(reused=0, evaluated=120, rebuilt=0)
    assert rig.model.calls == [50, 50, 20]
    assert_stands_at(rig.timeline, LONG[:120])


def test_equal_sync_evaluates_nothing_and_logits_still_answer(rig: Rig) -> None:
    rig.timeline.sync(LONG[:60])
    rig.model.calls.clear()
    assert rig.timeline.sync(LONG[:60]) == SyncReport(reused=60, evaluated=0, rebuilt=0)
    assert_stands_at(rig.timeline, LONG[:60])
    assert rig.model.calls == []


def test_sync_reuses_the_common_prefix(rig: Rig) -> None:
    rig.timeline.sync(LONG[:60])
    changed = [*LONG[:40], 9, 9, 9]
    assert rig.timeline.sync(changed) == SyncReport(reused=40, evaluated=3, rebuilt=0)
    assert_stands_at(rig.timeline, changed)


def test_sync_to_a_prefix_evaluates_nothing(rig: Rig) -> None:
    rig.timeline.sync(LONG[:60])
    assert rig.timeline.sync(LONG[:30]) == SyncReport(reused=30, evaluated=0, rebuilt=0)
    assert_stands_at(rig.timeline, LONG[:30])


def test_empty_sync_resets(rig: Rig) -> None:
    rig.timeline.sync(LONG[:300])
    assert rig.timeline.sync([]) == SyncReport(reused=0, evaluated=0, rebuilt=0)
    assert_stands_at(rig.timeline, [])


@pytest.mark.parametrize("count", [0, 1, 64, 127, 128])
def test_rewind_of_up_to_128_tokens_evaluates_nothing(rig: Rig, count: int) -> None:
    for token_id in LONG[:300]:
        rig.timeline.evaluate([token_id])
    rig.model.calls.clear()
    report = rig.timeline.rewind(count)
    assert report == SyncReport(reused=300 - count, evaluated=0, rebuilt=0)
    assert rig.model.calls == []
    assert_stands_at(rig.timeline, LONG[: 300 - count])


def test_logits_after_rewind_evaluate_exactly_one_token(rig: Rig) -> None:
    rig.timeline.evaluate(LONG[:300])
    rig.timeline.rewind(128)
    rig.model.calls.clear()
    rig.timeline.logits()
    assert rig.model.calls == [1]
    assert rig.timeline.totals.rebuilt == 1
    rig.timeline.logits()
    assert rig.model.calls == [1]


def test_rewind_to_a_turn_boundary_evaluates_nothing_and_knows_its_logits(rig: Rig) -> None:
    rig.timeline.sync(LONG[:37])
    rig.timeline.sync(LONG[:400])
    rig.model.calls.clear()
    assert rig.timeline.rewind(363) == SyncReport(reused=37, evaluated=0, rebuilt=0)
    assert_stands_at(rig.timeline, LONG[:37])
    assert rig.model.calls == []


def test_one_token_before_a_turn_boundary_evaluates_nothing(rig: Rig) -> None:
    rig.timeline.sync(LONG[:37])
    rig.timeline.sync(LONG[:400])
    assert rig.timeline.rewind(364) == SyncReport(reused=36, evaluated=0, rebuilt=0)
    rig.timeline.evaluate([7])
    assert_stands_at(rig.timeline, [*LONG[:36], 7])


def test_rewind_elsewhere_evaluates_from_the_last_checkpoint(rig: Rig) -> None:
    rig.timeline.sync(LONG[:100])
    rig.timeline.sync(LONG[:150])
    rig.timeline.sync(LONG[:400])
    rig.model.calls.clear()
    assert rig.timeline.rewind(230) == SyncReport(reused=150, evaluated=0, rebuilt=20)
    assert rig.model.calls == [20]
    assert_stands_at(rig.timeline, LONG[:170])


def test_rewind_without_checkpoint_starts_over(rig: Rig) -> None:
    rig.timeline.evaluate(LONG[:400])
    assert rig.timeline.rewind(200) == SyncReport(reused=0, evaluated=0, rebuilt=200)
    assert_stands_at(rig.timeline, LONG[:200])


def test_sync_far_back_reports_rebuilt_and_evaluated_apart(rig: Rig) -> None:
    rig.timeline.sync(LONG[:100])
    rig.timeline.sync(LONG[:400])
    changed = [*LONG[:160], 10, 10, 10]
    report = rig.timeline.sync(changed)
    assert report == SyncReport(reused=100, evaluated=3, rebuilt=60)
    assert_stands_at(rig.timeline, changed)


def test_rewound_checkpoints_are_forgotten(rig: Rig) -> None:
    rig.timeline.sync(LONG[:100])
    rig.timeline.sync(LONG[:110])
    rig.timeline.rewind(5)
    assert rig.timeline.checkpoints.positions == (100,)


def test_checkpoint_survives_the_logits_of_its_own_place(rig: Rig) -> None:
    rig.timeline.evaluate(LONG[:60])
    rig.timeline.rewind(10)
    rig.timeline.mark_turn()
    rig.timeline.logits()
    assert rig.timeline.checkpoints.positions == (50,)


def test_turn_is_kept_where_the_rings_have_lost_the_row_before(rig: Rig) -> None:
    rig.timeline.evaluate(LONG[:300])
    rig.timeline.rewind(129)
    rig.timeline.mark_turn()
    assert rig.timeline.checkpoints.positions == (171,)
    rig.timeline.evaluate(LONG[171:400])
    assert rig.timeline.rewind(229) == SyncReport(reused=171, evaluated=0, rebuilt=0)
    assert_stands_at(rig.timeline, LONG[:171])


def test_empty_timeline_can_be_marked(rig: Rig) -> None:
    rig.timeline.mark_turn()
    rig.timeline.evaluate(LONG[:300])
    assert rig.timeline.rewind(300) == SyncReport(reused=0, evaluated=0, rebuilt=0)


def test_oldest_checkpoints_are_given_up_first() -> None:
    one = 100 + 11 * 4
    rig = Rig(checkpoint_bytes=3 * one)
    for stop in (20, 40, 60, 80, 100):
        rig.timeline.sync(LONG[:stop])
    assert rig.timeline.checkpoints.positions == (60, 80, 100)
    assert rig.timeline.checkpoints.nbytes() == 3 * one


def test_without_budget_no_checkpoint_is_kept() -> None:
    rig = Rig(checkpoint_bytes=0)
    rig.timeline.sync(LONG[:400])
    assert rig.timeline.checkpoints.positions == ()
    assert rig.timeline.rewind(200) == SyncReport(reused=0, evaluated=0, rebuilt=200)


def test_evaluate_all_returns_every_row(rig: Rig) -> None:
    got = rig.timeline.evaluate(LONG[:70], rows="all", chunk=30)
    expected = [expected_logits(LONG[: n + 1]) for n in range(70)]
    np.testing.assert_array_equal(got, expected)
    assert rig.model.calls == [30, 30, 10]


def test_evaluate_none_returns_nothing_and_logits_come_later(rig: Rig) -> None:
    assert rig.timeline.evaluate(LONG[:5], rows="none") is None
    assert_stands_at(rig.timeline, LONG[:5])


def test_evaluate_nothing_changes_nothing(rig: Rig) -> None:
    rig.timeline.evaluate(LONG[:5])
    last = rig.timeline.evaluate([])
    assert last is not None
    assert last.shape == (0, 11)
    assert_stands_at(rig.timeline, LONG[:5])


def test_logits_are_a_copy(rig: Rig) -> None:
    rig.timeline.evaluate(LONG[:5])
    rig.timeline.logits()[:] = 0
    assert_stands_at(rig.timeline, LONG[:5])


def test_logits_of_an_empty_timeline_are_refused(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="no token yet"):
        rig.timeline.logits()


@pytest.mark.parametrize("bad", [-1, 11])
def test_unknown_token_is_refused_before_anything_happens(rig: Rig, bad: int) -> None:
    rig.timeline.sync(LONG[:20])
    with pytest.raises(ConfigError, match=f"found {bad} at position 1"):
        rig.timeline.sync([5, bad])
    with pytest.raises(ConfigError, match=f"found {bad}"):
        rig.timeline.evaluate([5, bad])
    assert_stands_at(rig.timeline, LONG[:20])


def test_too_long_a_sync_is_refused_before_anything_happens() -> None:
    rig = Rig(capacity=100)
    rig.timeline.sync(LONG[:50])
    rig.model.calls.clear()
    with pytest.raises(ContextFullError) as caught:
        rig.timeline.sync([9, *LONG[:100]])
    assert (caught.value.needed, caught.value.capacity) == (101, 100)
    assert rig.model.calls == []
    assert_stands_at(rig.timeline, LONG[:50])


def test_evaluating_past_the_capacity_is_refused() -> None:
    rig = Rig(capacity=10)
    rig.timeline.evaluate(LONG[:8])
    with pytest.raises(ContextFullError):
        rig.timeline.evaluate([1, 2, 3])
    assert_stands_at(rig.timeline, LONG[:8])


@pytest.mark.parametrize("count", [-1, 6])
def test_rewinding_more_than_there_is_is_refused(rig: Rig, count: int) -> None:
    rig.timeline.evaluate(LONG[:5])
    with pytest.raises(ConfigError, match=r"0\.\.5 tokens"):
        rig.timeline.rewind(count)
    assert_stands_at(rig.timeline, LONG[:5])


def test_numeric_error_leaves_the_finished_chunks(rig: Rig) -> None:
    rig.model.broken_position = 120
    with pytest.raises(NumericError):
        rig.timeline.sync(LONG[:200])
    assert_stands_at(rig.timeline, LONG[:100])
    rig.model.broken_position = None
    assert rig.timeline.sync(LONG[:200]).reused == 100


def test_numeric_error_of_one_token_changes_nothing(rig: Rig) -> None:
    rig.timeline.evaluate(LONG[:20])
    rig.model.broken_position = 20
    with pytest.raises(NumericError):
        rig.timeline.evaluate([3])
    assert list(rig.timeline.token_ids) == LONG[:20]


def test_cancelled_prefill_stands_at_the_last_finished_chunk(rig: Rig) -> None:
    def cancel_at(position: int) -> None:
        rig.is_cancelled = position >= 100

    rig.model.before_forward = cancel_at
    with pytest.raises(CancelledError):
        rig.timeline.sync(LONG[:200])
    rig.model.before_forward = lambda _position: None
    rig.is_cancelled = False
    assert_stands_at(rig.timeline, LONG[:100])
    assert rig.timeline.sync(LONG[:200]).reused == 100


def test_failed_rebuild_leaves_a_prefix_of_the_target(rig: Rig) -> None:
    rig.timeline.sync(LONG[:100])
    rig.timeline.sync(LONG[:400])
    rig.model.broken_position = 155
    with pytest.raises(NumericError):
        rig.timeline.rewind(230)
    assert_stands_at(rig.timeline, LONG[:150])


def test_failed_logits_after_rewind_lose_one_token(rig: Rig) -> None:
    rig.timeline.evaluate(LONG[:50])
    rig.timeline.rewind(10)
    rig.model.broken_position = 39
    with pytest.raises(NumericError):
        rig.timeline.logits()
    assert list(rig.timeline.token_ids) == LONG[:39]


def test_keyboard_interrupt_inside_the_model_keeps_ids_and_cache_together(rig: Rig) -> None:
    def interrupt(position: int) -> None:
        if position == 50:
            raise KeyboardInterrupt

    rig.model.before_forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        rig.timeline.sync(LONG[:120])
    rig.model.before_forward = lambda _position: None
    assert_stands_at(rig.timeline, LONG[:50])


def test_progress_counts_tokens_to_evaluate(rig: Rig) -> None:
    rig.timeline.sync(LONG[:30])
    seen: list[tuple[int, int]] = []
    rig.timeline.sync(LONG[:150], lambda done, total: seen.append((done, total)))
    assert seen == [(50, 120), (100, 120), (120, 120)]


def test_single_new_token_makes_no_checkpoint(rig: Rig) -> None:
    rig.timeline.sync(LONG[:30])
    rig.timeline.sync(LONG[:31])
    assert rig.timeline.checkpoints.positions == (30,)


def test_totals_tell_evaluated_from_rebuilt(rig: Rig) -> None:
    rig.timeline.sync(LONG[:100])
    rig.timeline.sync(LONG[:400])
    rig.timeline.sync([*LONG[:160], 10, 10])
    assert (rig.timeline.totals.evaluated, rig.timeline.totals.rebuilt) == (402, 60)
