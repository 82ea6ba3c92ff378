"""What guesses are worth never exceeds what there was to guess."""

from __future__ import annotations

from edgedsv4.runtime.guess_replay import GuessCounts


def test_an_expert_that_a_guess_names_again_counts_once() -> None:
    counts = GuessCounts(tokens=1)
    counts.judge(1, {3, 5}, [3, 3, 4, 3], {3, 4, 5})
    assert counts.recall(4) == 0.5
    assert counts.reads == [1, 2]
    assert counts.wasted(2) == 1.0
