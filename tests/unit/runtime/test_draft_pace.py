"""When drafting is tried, kept, paused and tried again, given how long steps take."""

from __future__ import annotations

from edgedsv4.runtime.draft_pace import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    PLAIN_STEPS,
    TRIAL_STEPS,
    TRIALS_PER_PLAIN,
    DraftPace,
)


def run(pace: DraftPace, steps: int, *, drafted: float, plain: float = 1.0) -> list[bool]:
    """What `steps` steps did, given seconds per token."""
    done = []
    for _ in range(steps):
        done.append(pace.is_drafting)
        seconds = drafted if pace.is_drafting else plain
        pace.record(2 * seconds, 2, is_drafted=pace.is_drafting)
    return done


def test_plain_decoding_is_measured_first_then_drafts_are_tried() -> None:
    done = run(DraftPace(), PLAIN_STEPS + TRIAL_STEPS, drafted=0.5)
    assert done == [False] * PLAIN_STEPS + [True] * TRIAL_STEPS


def test_faster_drafts_go_on_and_plain_decoding_is_measured_now_and_then() -> None:
    pace = DraftPace()
    run(pace, PLAIN_STEPS, drafted=0.5)
    period = TRIALS_PER_PLAIN * TRIAL_STEPS
    done = run(pace, 2 * (period + PLAIN_STEPS), drafted=0.5)
    assert done == ([True] * period + [False] * PLAIN_STEPS) * 2


def test_slower_drafts_are_paused_for_longer_and_longer() -> None:
    pace = DraftPace()
    run(pace, PLAIN_STEPS, drafted=2.0)
    for pause in (FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE):
        assert run(pace, TRIAL_STEPS, drafted=2.0) == [True] * TRIAL_STEPS
        assert pace.is_paused
        assert run(pace, pause, drafted=2.0) == [False] * pause
        assert not pace.is_paused


def test_pauses_are_bounded() -> None:
    done = run(DraftPace(), 40_000, drafted=2.0)
    longest = max(len(run_) for run_ in "".join(".x"[d] for d in done).split("x"))
    assert longest == LONGEST_PAUSE


def test_drafts_that_became_faster_are_kept_after_a_pause() -> None:
    pace = DraftPace()
    run(pace, PLAIN_STEPS + TRIAL_STEPS + FIRST_PAUSE, drafted=5.0)
    assert run(pace, 2 * TRIAL_STEPS, drafted=0.9) == [True] * 2 * TRIAL_STEPS


def test_first_step_of_a_phase_does_not_count() -> None:
    pace = DraftPace()
    for step in range(PLAIN_STEPS + TRIAL_STEPS):
        is_first = step in (0, PLAIN_STEPS)
        pace.record(100.0 if is_first else 1.0, 1, is_drafted=pace.is_drafting)
    assert pace.seconds_per_token() == (1.0, 1.0)


def test_step_that_could_not_draft_does_not_count() -> None:
    pace = DraftPace()
    run(pace, PLAIN_STEPS, drafted=0.5)
    pace.record(1000.0, 1, is_drafted=False)
    assert pace.seconds_per_token() == (1.0, 0.0)
    assert run(pace, TRIAL_STEPS, drafted=0.5) == [True] * TRIAL_STEPS


def test_equal_speed_goes_on() -> None:
    pace = DraftPace()
    run(pace, PLAIN_STEPS + TRIAL_STEPS, drafted=1.0)
    assert pace.is_drafting


def test_slow_first_steps_are_forgotten_when_plain_decoding_is_measured_again() -> None:
    pace = DraftPace()
    run(pace, PLAIN_STEPS, drafted=1.2, plain=5.0)
    period = TRIALS_PER_PLAIN * TRIAL_STEPS
    assert run(pace, period, drafted=1.2) == [True] * period
    run(pace, PLAIN_STEPS + TRIAL_STEPS, drafted=1.2)
    assert pace.is_paused
