"""Replays count what the engine's books would: hits by tier, reads, moves; on traces small enough
to follow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgedsv4.errors import ConfigError
from edgedsv4.formats.next_pairs import NextPairs
from edgedsv4.formats.route_trace import NO_GUESS, RouteShape, RouteTrace, Run
from edgedsv4.runtime.route_replay import ReplayOptions, replay_routes, slots_of_share
from edgedsv4.runtime.synthetic_routes import NAMED_ROUTES, conversation_routes, zipf_routes

SHAPE = RouteShape(2, 16, 2)


def trace_of(
    *tokens: list[list[int]], runs: tuple[Run, ...] = (Run(0, "decode", True),)
) -> RouteTrace:
    ids = np.array(tokens, dtype=np.uint16)
    return RouteTrace(RouteShape(ids.shape[1], 16, ids.shape[2]), ids, runs)


def test_hits_reads_and_evictions_are_counted() -> None:
    trace = trace_of([[0, 1]], [[0, 2]], [[1, 2]])
    counts = replay_routes(trace, ReplayOptions(slots=(2,), policy="lru"))
    assert (counts.tokens, counts.selections, counts.hits, counts.reads) == (3, 6, [2], 4)
    assert counts.evictions == 2
    assert counts.to_json(1000) == {
        "tokens": 3,
        "hit_rate": 0.333333,
        "hit_rate_by_tier": [0.333333],
        "reads_per_token": 1.3333,
        "moved_up_per_token": 0.0,
        "evictions_per_token": 0.6667,
        "prefill_tokens": 0,
        "prefill_reads": 0,
        "bytes_per_token": 1333,
    }


def test_layers_are_apart() -> None:
    trace = trace_of([[0], [0]], [[0], [0]])
    assert replay_routes(trace, ReplayOptions(slots=(2,), policy="lru")).hits == [2]


def test_expert_of_the_lower_tier_moves_up_when_it_is_used() -> None:
    trace = trace_of([[0]], [[0]], [[0]], [[1]], [[2]], [[0]])
    counts = replay_routes(trace, ReplayOptions(slots=(1, 1), policy="lru"))
    assert counts.hits == [2, 1]  # read, found below and moved up, found above twice
    assert (counts.moved_up, counts.reads) == (1, 3)
    assert counts.hit_rate(0) == pytest.approx(2 / 6)


def test_tiers_hold_no_expert_twice() -> None:
    trace = zipf_routes(SHAPE, 300, seed=1)
    everything = SHAPE.layers * SHAPE.experts
    counts = replay_routes(trace, ReplayOptions(slots=(8, everything - 8), policy="lru"))
    assert counts.reads >= everything
    assert counts.moved_up > 0


def test_prefill_is_counted_apart() -> None:
    runs = (Run(0, "prefill", True), Run(3, "decode", False))
    trace = trace_of([[0, 1]], [[0, 2]], [[1, 2]], [[0, 3]], runs=runs)
    counts = replay_routes(trace, ReplayOptions(slots=(3,), policy="lru", prefill_chunk=2))
    assert (counts.tokens, counts.selections, counts.hits) == (1, 2, [1])
    assert (counts.prefill_tokens, counts.prefill_reads) == (3, 3)


def test_prefill_chunk_wants_each_expert_once() -> None:
    runs = (Run(0, "prefill", True),)
    trace = trace_of(*([[[0, 1]]] * 10), runs=runs)
    one = replay_routes(trace, ReplayOptions(slots=(1,), policy="lru", prefill_chunk=10))
    assert one.prefill_reads == 2
    assert (one.tokens, one.hit_rate()) == (0, 0.0)


def test_one_long_prompt_leaves_the_hot_experts() -> None:
    hot = [[[0, 1]]] * 200
    rng = np.random.default_rng(0)
    prompt = [[rng.choice(16, size=2, replace=False).tolist()] for _ in range(100)]
    runs = (Run(0, "decode", True), Run(200, "prefill", True), Run(300, "decode", False))
    trace = trace_of(*hot, *prompt, *hot[:10], runs=runs)
    kept = replay_routes(trace, ReplayOptions(slots=(2,), prefill_chunk=100))
    assert kept.reads == 2  # the first token's alone


def test_prior_of_the_frequency_file_helps_from_the_start() -> None:
    trace = zipf_routes(RouteShape(2, 64, 2), 150, seed=3)
    counts = np.stack([np.bincount(trace.ids[:, n].ravel(), minlength=64) for n in range(2)])
    slots = slots_of_share(trace.shape, 0.2)
    without = replay_routes(trace, ReplayOptions(slots=(slots,)))
    informed = replay_routes(trace, ReplayOptions(slots=(slots,), prior=counts / 150))
    assert informed.hit_rate() > without.hit_rate() + 0.01


def test_prior_of_another_shape_is_refused() -> None:
    trace = zipf_routes(SHAPE, 5, seed=1)
    with pytest.raises(ConfigError, match=r"\[1, 16\], the trace has \[2, 16\]"):
        replay_routes(trace, ReplayOptions(slots=(2,), prior=np.ones((1, 16))))


@pytest.mark.parametrize(
    "options",
    [{"slots": ()}, {"slots": (1, 1, 1)}, {"slots": (0,)}, {"slots": (1,), "prefill_chunk": 0}],
)
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"slots|prefill_chunk"):
        ReplayOptions(**options)  # type: ignore[arg-type]


def test_no_policy_has_fewer_misses_than_belady() -> None:
    trace = conversation_routes(RouteShape(2, 32, 3), 400, seed=4)
    rates = {
        policy: replay_routes(trace, ReplayOptions(slots=(16,), policy=policy)).hit_rate()
        for policy in ("belady", "aged", "lru", "lfu")
    }
    assert max(rates, key=lambda name: rates[name]) == "belady"


def test_belady_finds_the_optimum_of_a_small_trace() -> None:
    trace = trace_of([[0]], [[1]], [[2]], [[0]], [[1]], [[3]], [[0]], [[1]])
    keeping = ReplayOptions(slots=(2,), policy="belady", may_refuse=False)
    assert replay_routes(trace, keeping).hits == [2]
    assert replay_routes(trace, ReplayOptions(slots=(2,), policy="belady")).hits == [4]


@pytest.mark.parametrize(("share", "slots"), [(0.001, 2), (0.25, 8), (1.0, 32)])
def test_share_of_all_experts_in_slots(share: float, slots: int) -> None:
    assert slots_of_share(SHAPE, share) == slots


@pytest.mark.parametrize("share", [0.0, 1.01, -1.0, float("nan")])
def test_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="resident share"):
        slots_of_share(SHAPE, share)


# ---- made-up routes ----


@pytest.mark.parametrize("name", NAMED_ROUTES)
def test_same_seed_gives_the_same_routes(name: str) -> None:
    first, again, other = (NAMED_ROUTES[name](SHAPE, 60, seed) for seed in (5, 5, 6))
    assert np.array_equal(first.ids, again.ids)
    assert not np.array_equal(first.ids, other.ids)


@pytest.mark.parametrize("name", NAMED_ROUTES)
def test_tokens_use_different_experts(name: str) -> None:
    ids = np.sort(NAMED_ROUTES[name](SHAPE, 60, 5).ids, axis=2)
    assert ids.shape == (60, 2, 2)
    assert (ids[..., 1:] > ids[..., :-1]).all()
    assert int(ids.max()) < SHAPE.experts


def test_published_routes_have_the_published_skew() -> None:
    trace = NAMED_ROUTES["published"](RouteShape(2, 256, 6), 1000, 1)
    for layer in range(2):
        counts = np.sort(np.bincount(trace.ids[:, layer].ravel(), minlength=256))[::-1]
        assert counts[: round(0.09 * 256)].sum() / counts.sum() == pytest.approx(0.95, abs=0.01)


def test_conversations_begin_texts() -> None:
    trace = conversation_routes(SHAPE, 2000, 1, mean_tokens=200)
    assert 5 < len(trace.runs) < 30
    assert all(run.begins_text for run in trace.runs)


def guessing(ids: list[list[list[int]]], guesses: list[list[list[int]]]) -> RouteTrace:
    found = np.array(guesses)
    trace = trace_of(*ids)
    return replace(trace, guesses=np.where(found < 0, NO_GUESS, found).astype(np.uint16))


def test_guesses_are_judged_by_what_is_absent() -> None:
    ids = [[[0, 1], [2, 3]], [[0, 1], [3, 4]]]
    guesses = [[[-1] * 3, [2, 5, 3]], [[-1] * 3, [3, 6, 5]]]
    trace = guessing(ids, guesses)
    found = replay_routes(trace, ReplayOptions(slots=(8,), policy="lru")).guesses
    assert found is not None
    # First token: 2 and 3 are absent, 5 in vain. Second: 3 is there, 4 is not named, two in vain.
    assert found.to_json() == {
        "misses_per_token": 1.5,
        "recall": [0.333333, 0.333333, 0.666667],
        "reads_per_token": [0.5, 1.5, 2.5],
        "wasted_per_useful": [0.0, 2.0, 1.5],
        "recall_by_layer": {"1": [0.333333, 0.333333, 0.666667]},
    }


def test_guesses_change_nothing_else() -> None:
    ids = [[[n % 5, 5 + n % 3], [n % 7, 7 + n % 2]] for n in range(60)]
    guesses = [[[-1] * 2, [n % 9, 10 + n % 3]] for n in range(60)]
    options = ReplayOptions(slots=(6,), policy="aged")
    with_guesses = replay_routes(guessing(ids, guesses), options)
    assert with_guesses.guesses is not None
    assert replace(with_guesses, guesses=None) == replay_routes(trace_of(*ids), options)


def test_prefill_is_not_guessed() -> None:
    trace = replace(
        guessing([[[0, 1], [2, 3]]] * 3, [[[-1] * 2, [2, 3]]] * 3),
        runs=(Run(0, "prefill", True), Run(2, "decode", False)),
    )
    found = replay_routes(trace, ReplayOptions(slots=(2,), policy="lru")).guesses
    assert found is not None
    assert (found.tokens, found.misses) == (1, {1: 2})


def test_pairs_are_judged_instead() -> None:
    trace = guessing([[[0, 1], [2, 3]]] * 4, [[[-1] * 2, [9, 8]]] * 4)
    experts = np.tile(np.array([2, 9], dtype=np.int32), (1, 16, 1))
    counts = np.tile(np.array([2, 1], dtype=np.uint64), (1, 16, 1))
    pairs = NextPairs(experts, counts, np.full((1, 16), 4, dtype=np.uint64))
    options = ReplayOptions(slots=(2,), policy="lru", pairs=pairs)
    found = replay_routes(trace, options).guesses
    assert found is not None
    assert (found.recall(1), found.recall(2), found.wasted(2)) == (0.5, 0.5, 1.0)


@pytest.mark.parametrize("count", [0, 65])
def test_absurd_numbers_of_guesses_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=r"pair_guesses must be 1\.\.64"):
        ReplayOptions(slots=(2,), pair_guesses=count)
