"""The policy that the program uses is at least as good as the others, on every trace there is."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from edgedsv4.formats.route_trace import RouteShape, RouteTrace, read_route_trace
from edgedsv4.runtime.route_replay import ReplayOptions, replay_routes, slots_of_share
from edgedsv4.runtime.synthetic_routes import NAMED_ROUTES

if TYPE_CHECKING:
    from edgedsv4.config import ReplayPolicy

FOLDER = Path(__file__).parents[2] / "data" / "routes"
STORED = sorted(path.stem for path in FOLDER.glob("*.routes"))
SHAPE = RouteShape(layers=2, experts=256, experts_per_token=6)  # two layers of V4-Flash
TOKENS, SEED = 1500, 1
SHARES = (0.15, 0.3, 0.5)


@cache
def trace_of(name: str) -> RouteTrace:
    if name in STORED:
        return read_route_trace(FOLDER / f"{name}.routes")
    return NAMED_ROUTES[name](SHAPE, TOKENS, SEED)


@cache
def hit_rate(name: str, share: float, policy: ReplayPolicy) -> float:
    trace = trace_of(name)
    slots = slots_of_share(trace.shape, share)
    return replay_routes(trace, ReplayOptions(slots=(slots,), policy=policy)).hit_rate()


def test_routes_of_both_models_are_stored() -> None:
    assert STORED == ["pocket-v4", "pocket-v4-e16"]


def best_other(name: str, share: float) -> float:
    return max(hit_rate(name, share, "lru"), hit_rate(name, share, "lfu"))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", STORED)
def test_expected_use_is_clearly_better_on_real_routes(name: str, share: float) -> None:
    assert hit_rate(name, share, "aged") > best_other(name, share) + 0.03


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", NAMED_ROUTES)
def test_expected_use_is_never_worse_than_chance_explains(name: str, share: float) -> None:
    """Where nothing can be learned, as in `uniform`, all policies are equal but for luck: one
    standard error of a hit rate over this many selections."""
    best = best_other(name, share)
    error = math.sqrt(max(best * (1 - best), 1e-9) / trace_of(name).ids.size)
    assert hit_rate(name, share, "aged") >= best - error


@pytest.mark.parametrize(
    ("name", "share", "points"),
    [
        ("zipf", 0.15, 0.002),
        ("conversations", 0.15, 0.01),
        ("steady", 0.15, 0.04),
        ("steady", 0.3, 0.005),
        ("restless", 0.5, 0.003),
        ("scan", 0.5, 0.2),
    ],
)
def test_expected_use_is_better_where_it_can_learn(name: str, share: float, points: float) -> None:
    assert hit_rate(name, share, "aged") > best_other(name, share) + points


@pytest.mark.parametrize("share", SHARES)
def test_expected_use_comes_near_the_bound_on_steady_skew(share: float) -> None:
    assert hit_rate("zipf", share, "aged") >= 0.85 * hit_rate("zipf", share, "belady")
