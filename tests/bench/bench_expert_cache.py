"""Keeping the books of one decoded token of V4-Flash: 43 layers of 256 experts, 6 used in each.

Routes are skewed (rank ** -0.9) and 30 % of the experts are resident, so that about 77 of the 258
selections miss. What is timed is what the engine does: count, look up, take, publish, age.
Processor time of one thread, median over the tokens behind a warm-up.
"""

from __future__ import annotations

import statistics
import time

import harness
from harness import Figure

from edgedsv4.formats.route_trace import RouteShape
from edgedsv4.runtime.cache_policies import make_policy
from edgedsv4.runtime.expert_cache import ExpertCache
from edgedsv4.runtime.synthetic_routes import zipf_routes

SHAPE = RouteShape(layers=43, experts=256, experts_per_token=6)
SLOTS = 3300
WARM_UP = 100
TOKENS = 40
"""Of one reading."""


def decode_token(cache: ExpertCache, layers: list[list[int]]) -> int:
    """One token; returns its misses."""
    misses = 0
    for layer, ids in enumerate(layers):
        cache.use(layer, ids)
        missing = [expert for expert in ids if cache.find(layer, expert) is None]
        misses += len(missing)
        if not missing:
            continue
        protected = {(layer, expert) for expert in ids}
        for expert in missing:
            if cache.take(layer, expert, protected=protected, may_refuse=True) is not None:
                cache.publish(layer, expert)
    cache.end_step(1)
    return misses


def measure(repeats: int) -> list[Figure]:
    """Microseconds and misses per token, by policy."""
    rows = zipf_routes(SHAPE, WARM_UP + TOKENS * repeats, seed=1, exponent=0.9).ids.tolist()
    figures = []
    for name in ("lru", "lfu", "aged"):
        cache = ExpertCache(SLOTS, make_policy(name, SHAPE.layers, SHAPE.experts))
        for layers in rows[:WARM_UP]:
            decode_token(cache, layers)
        seconds, misses = [], 0
        for layers in rows[WARM_UP:]:
            start = time.process_time()
            misses += decode_token(cache, layers)
            seconds.append(time.process_time() - start)
        tokens = len(seconds)
        figures.append(
            Figure("expert cache", name, 1e6 * statistics.median(seconds), "µs per token", tokens)
        )
        figures.append(Figure("expert cache", name, misses / tokens, "misses per token", tokens))
    return figures


if __name__ == "__main__":
    harness.main(measure)
