"""Drafts never change the text: a fake block that is right or wrong as told, and every way out."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import numpy as np
import pytest
from drafting_fakes import DraftingModel
from runtime_fakes import FakeModel, expected_logits

from edgedsv4.config import EngineOptions, SamplingOptions
from edgedsv4.errors import CancelledError, NumericError
from edgedsv4.runtime.sampler import Sampler
from edgedsv4.runtime.stats import DraftStats, SyncReport
from edgedsv4.runtime.timeline import Timeline

LONG = [i % 11 for i in range(400)]
WARM = 4
"""Steps that measure plain decoding before the first draft."""


class Rig:
    """A timeline of a drafting model, with a clock that stands still."""

    def __init__(self, draft: int = 3, *, capacity: int = 1000, chunk: int = 50) -> None:
        self.model = DraftingModel()
        self.is_cancelled = False
        self.seconds = 0.0
        self.timeline = Timeline(
            self.model if draft else FakeModel(),  # type: ignore[arg-type]
            capacity=capacity,
            options=EngineOptions(prefill_chunk=chunk, draft=draft),
            check_files=lambda: None,
            should_stop=lambda: self.is_cancelled,
            clock=lambda: self.seconds,
        )

    def decode(
        self,
        count: int,
        options: SamplingOptions | None = None,
        stop_ids: tuple[int, ...] = (),
        check: Callable[[], None] = lambda: None,
    ) -> list[int]:
        options = options or SamplingOptions(temperature=0, max_tokens=count)
        sampler = Sampler(options, 11)
        sampler.observe(self.timeline.token_ids)
        return list(self.timeline.decode(sampler, stop_ids, check))

    def warmed(self) -> Rig:
        """Behind the steps that measure plain decoding."""
        self.timeline.sync(LONG[:20])
        self.decode(WARM)
        self.model.calls.clear()
        self.model.draft_calls.clear()
        return self

    @property
    def stats(self) -> DraftStats:
        assert self.timeline.drafts is not None
        return self.timeline.drafts


def greedy(prefix: list[int], count: int) -> list[int]:
    """What plain greedy decoding says."""
    made: list[int] = []
    for _ in range(count):
        made.append(int(np.argmax(expected_logits([*prefix, *made]))))
    return made


def assert_stands_at(timeline: Timeline, ids: list[int]) -> None:
    assert list(timeline.token_ids) == ids
    assert timeline.length == len(ids)
    np.testing.assert_array_equal(timeline.logits(), expected_logits(ids))
    assert list(timeline.token_ids) == ids


@pytest.mark.parametrize("draft", [1, 2, 3, 8])
@pytest.mark.parametrize("start", [1, 20, 300])
def test_any_pattern_of_right_and_wrong_drafts_gives_the_plain_text(draft: int, start: int) -> None:
    expected = LONG[:start] + greedy(LONG[:start], 40)
    for seed in range(20):
        bits = random.Random(seed)
        share = bits.random()
        rig = Rig(draft)
        rig.model.is_right = lambda _at, bits=bits, share=share: bits.random() < share
        rig.timeline.sync(LONG[:start])
        rig.decode(40)
        assert_stands_at(rig.timeline, expected)


def test_every_pattern_of_three_steps_gives_the_plain_text() -> None:
    for pattern in range(1 << 9):
        rig = Rig(3).warmed()
        ids = list(rig.timeline.token_ids)
        rig.model.is_right = lambda at, bits=pattern: bool(bits >> (at % 9) & 1)
        assert rig.decode(9) == greedy(ids, 9)
        assert_stands_at(rig.timeline, ids + greedy(ids, 9))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 4},
        {"temperature": 1.5, "top_p": 0.8, "min_p": 0.05},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7},
        {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.7},
        {"logit_bias": {3: -float("inf"), 5: 2.0}},
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_seed_gives_one_text_with_and_without_drafts(
    options: dict[str, object], seed: int
) -> None:
    chosen = SamplingOptions(seed=seed, max_tokens=60, **options)  # type: ignore[arg-type]
    plain = Rig(0)
    plain.timeline.sync(LONG[:30])
    expected = plain.decode(60, chosen)
    for share in (0.0, 0.6, 1.0):
        bits = random.Random(seed)
        rig = Rig(3)
        rig.model.is_right = lambda _at, bits=bits, share=share: bits.random() < share
        rig.timeline.sync(LONG[:30])
        assert rig.decode(60, chosen) == expected


def test_a_block_of_the_same_opinion_is_always_accepted_whatever_the_seed() -> None:
    rig = Rig(3)
    rig.timeline.sync(LONG[:30])
    rig.decode(44, SamplingOptions(seed=3, max_tokens=44, frequency_penalty=1.0))
    assert rig.stats.acceptance == (1.0, 1.0, 1.0)
    assert rig.stats.drafted_steps == 10


def test_right_drafts_save_passes_over_the_main_model() -> None:
    rig = Rig(3).warmed()
    rig.decode(12)
    assert rig.model.calls == [4, 4, 4]
    assert rig.timeline.totals.evaluated == 20 + WARM + 12
    assert rig.timeline.totals.generated == WARM + 12
    assert rig.timeline.totals.rebuilt == 0


def test_block_reads_only_what_it_has_not_seen() -> None:
    rig = Rig(2).warmed()
    rig.decode(9)
    # The last window of the prompt, then what was accepted; each second draft is one token.
    assert rig.model.draft_calls == [8, 1, 3, 1, 3, 1]


def test_block_catches_up_in_chunks() -> None:
    rig = Rig(1, chunk=3)
    rig.timeline.sync(LONG[:40])
    rig.decode(WARM + 2)
    assert rig.model.draft_calls[:3] == [3, 3, 2]


def test_acceptance_is_counted_by_place() -> None:
    rig = Rig(3).warmed()
    start = rig.timeline.length
    # Steps begin at 0, 2, 5 and 6, with 1, 2, 0 and 3 right drafts.
    rig.model.is_right = lambda at: at - start not in {2, 5, 6}
    rig.decode(10)
    assert (rig.stats.drafted, rig.stats.accepted) == ((4, 4, 4), (3, 2, 1))
    assert (rig.stats.drafted_steps, rig.stats.plain_steps) == (4, WARM)
    assert rig.stats.tokens_per_step == 2.5


def test_drafts_behind_the_end_of_a_reply_are_not_counted() -> None:
    rig = Rig(3).warmed()
    tokens = rig.timeline.decode(Sampler(SamplingOptions(temperature=0), 11), (), lambda: None)
    next(tokens)
    next(tokens)
    rig.timeline.mark_turn()
    assert rig.stats.drafted == rig.stats.accepted == (1, 0, 0)


def test_tokens_are_part_of_the_timeline_one_by_one() -> None:
    rig = Rig(3).warmed()
    ids = list(rig.timeline.token_ids)
    for token_id in rig.timeline.decode(
        Sampler(SamplingOptions(temperature=0, max_tokens=10), 11), (), lambda: None
    ):
        ids.append(token_id)
        assert list(rig.timeline.token_ids) == ids
        assert rig.timeline.length == len(ids)


def test_iterator_that_is_given_up_leaves_what_it_gave() -> None:
    rig = Rig(3).warmed()
    ids = list(rig.timeline.token_ids)
    tokens = rig.timeline.decode(Sampler(SamplingOptions(temperature=0), 11), (), lambda: None)
    ids += [next(tokens), next(tokens)]
    assert list(rig.timeline.token_ids) == ids
    rig.timeline.evaluate([7])
    assert_stands_at(rig.timeline, [*ids, 7])


def test_stop_token_among_accepted_drafts_ends_the_text() -> None:
    rig = Rig(3).warmed()
    ids = list(rig.timeline.token_ids)
    expected = greedy(ids, 10)
    stop = next(t for t in expected[1:] if t != expected[0])
    cut = expected[: expected.index(stop) + 1]
    assert rig.decode(10, stop_ids=(stop,)) == cut
    assert_stands_at(rig.timeline, ids + cut)


def test_nothing_is_drafted_behind_a_stop_token() -> None:
    rig = Rig(3).warmed()
    ids = list(rig.timeline.token_ids)
    first, second = greedy(ids, 2)
    assert first != second
    rig.decode(10, stop_ids=(second,))
    assert rig.model.calls == [2]


def test_token_limit_bounds_the_drafts() -> None:
    rig = Rig(8).warmed()
    ids = list(rig.timeline.token_ids)
    assert rig.decode(5) == greedy(ids, 5)
    assert rig.model.calls == [5]


def test_end_of_the_context_bounds_the_drafts() -> None:
    rig = Rig(8, capacity=20 + WARM + 6).warmed()
    ids = list(rig.timeline.token_ids)
    assert rig.decode(100) == greedy(ids, 6)
    assert rig.model.calls == [6]
    assert list(rig.timeline.token_ids) == ids + greedy(ids, 6)


@pytest.mark.parametrize("after", [1, 2, 3, 4, 5])
def test_cancel_between_tokens_leaves_what_was_given(after: int) -> None:
    rig = Rig(3).warmed()
    ids = list(rig.timeline.token_ids)
    given: list[int] = []

    def check() -> None:
        if len(given) == after:
            raise CancelledError("cancelled")

    tokens = rig.timeline.decode(Sampler(SamplingOptions(temperature=0), 11), (), check)
    with pytest.raises(CancelledError):
        given.extend(tokens)
    assert_stands_at(rig.timeline, ids + greedy(ids, after))


@pytest.mark.parametrize("where", ["draft", "main"])
@pytest.mark.parametrize("error", [CancelledError, KeyboardInterrupt])
def test_stop_inside_a_step_leaves_what_was_given(where: str, error: type[BaseException]) -> None:
    rig = Rig(3).warmed()
    ids = list(rig.timeline.token_ids)

    def stop(*_: object) -> None:
        if rig.timeline.length >= len(ids) + 4:
            raise error

    if where == "draft":
        rig.model.before_draft = stop
    else:
        rig.model.before_forward = stop
    with pytest.raises(error):
        rig.decode(20)
    rig.model.before_draft = rig.model.before_forward = lambda *_: None
    assert_stands_at(rig.timeline, ids + greedy(ids, 4))
    assert rig.decode(6) == greedy(ids, 10)[4:]


def test_interrupt_right_after_the_chunk_makes_no_draft_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(3).warmed()
    ids = list(rig.timeline.token_ids)
    real = DraftingModel.forward

    def interrupted(model: DraftingModel, token_ids: object, *args: object, **more: object) -> None:
        real(model, token_ids, *args, **more)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(DraftingModel, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rig.decode(5)
    monkeypatch.undo()
    assert_stands_at(rig.timeline, ids + greedy(ids, 1))
    assert rig.decode(6) == greedy(ids, 7)[1:]


def test_block_that_fails_is_switched_off_and_the_text_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(3).warmed()
    ids = list(rig.timeline.token_ids)
    rig.model.broken_draft = len(ids) + 6
    with caplog.at_level(logging.WARNING):
        assert rig.decode(20) == greedy(ids, 20)
    assert_stands_at(rig.timeline, ids + greedy(ids, 20))
    assert rig.stats.state == "off: a draft became NaN"
    assert sum("drafts no more" in record.getMessage() for record in caplog.records) == 1


def test_failure_behind_a_wrong_draft_does_not_reach_the_text() -> None:
    rig = Rig(2).warmed()
    ids = list(rig.timeline.token_ids)
    first = greedy(ids, 1)
    wrong = int(np.argmin(expected_logits([*ids, *first])))
    rig.model.is_right = lambda _at: False
    rig.model.fails_behind = (*ids, *first, wrong)
    assert rig.decode(8) == greedy(ids, 8)
    assert_stands_at(rig.timeline, ids + greedy(ids, 8))


def test_failure_of_the_main_model_is_raised_where_plain_decoding_raises_it() -> None:
    rig = Rig(3).warmed()
    ids = list(rig.timeline.token_ids)
    rig.model.broken_position = len(ids) + 6
    with pytest.raises(NumericError):
        rig.decode(20)
    assert_stands_at(rig.timeline, ids + greedy(ids, 6))


@pytest.mark.parametrize("count", [1, 5, 60, 124])
def test_drafting_goes_on_after_a_rewind(count: int) -> None:
    rig = Rig(2)
    rig.timeline.sync(LONG[:300])
    rig.decode(40)
    rig.model.draft_calls.clear()
    assert rig.timeline.rewind(count).rebuilt == 0
    ids = list(rig.timeline.token_ids)
    rig.timeline.evaluate([9])
    assert rig.decode(10) == greedy([*ids, 9], 10)
    assert rig.model.draft_calls


def test_turn_checkpoint_brings_back_what_the_first_draft_needs() -> None:
    rig = Rig(2)
    rig.timeline.sync(LONG[:30])
    rig.decode(200)
    rig.model.calls.clear()
    assert rig.timeline.rewind(200) == SyncReport(reused=30, evaluated=0, rebuilt=0)
    assert rig.decode(9) == greedy(LONG[:30], 9)
    assert rig.model.calls == [3, 3, 3]


def test_sync_to_another_text_drafts_from_it() -> None:
    rig = Rig(2)
    rig.timeline.sync(LONG[:60])
    rig.decode(10)
    changed = [*LONG[:40], 9, 9, 9]
    rig.timeline.sync(changed)
    assert rig.decode(10) == greedy(changed, 10)
    assert_stands_at(rig.timeline, changed + greedy(changed, 10))


def test_checkpoint_among_drafts_is_one_of_the_timeline() -> None:
    rig = Rig(3).warmed()
    ids = list(rig.timeline.token_ids)
    tokens = rig.timeline.decode(Sampler(SamplingOptions(temperature=0), 11), (), lambda: None)
    ids += [next(tokens), next(tokens)]
    rig.timeline.mark_turn()
    assert rig.timeline.checkpoints.positions[-1] == len(ids)
    rig.timeline.evaluate(LONG[:300])
    rig.timeline.rewind(300)
    assert_stands_at(rig.timeline, ids)


def test_slower_drafts_are_paused_and_tried_again() -> None:
    rig = Rig(1, capacity=3000)

    def spend(*_: object) -> None:
        rig.seconds += 1.0

    rig.model.before_forward = spend
    rig.model.before_draft = spend
    rig.model.is_right = lambda _at: False
    rig.timeline.sync(LONG[:20])
    rig.decode(WARM + 17)
    assert rig.stats.drafted_steps == 16
    assert rig.stats.state == "paused: slower than without"
    rig.decode(255)
    assert (rig.stats.drafted_steps, rig.stats.state) == (16, "on")
    rig.decode(17)
    assert rig.stats.drafted_steps == 32


def test_without_drafts_nothing_is_kept() -> None:
    rig = Rig(0)
    rig.timeline.sync(LONG[:30])
    rig.decode(5)
    assert rig.timeline.drafts is None
    assert rig.timeline.checkpoints.nbytes() == 100 + 11 * 4
    assert rig.timeline.nbytes() == 1000 + rig.timeline.checkpoints.nbytes() + 11 * 4
