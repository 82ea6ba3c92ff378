"""Made-up routes with known statistics, for judging cache policies without a model.

Every generator draws, for each token and layer, k different experts with the odds of its kind; the
same seed gives the same trace. `named_routes` holds the kinds that policies are judged on.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from edgedsv4.formats.route_trace import RouteShape, RouteTrace, Run

Floats = npt.NDArray[np.float64]

PUBLISHED_EXPONENT = 2.35
"""Exponent at which 95 % of 6-of-256 selections fall on 9 % of a layer's experts."""
_GLOBAL_SPREAD, _TOPIC_SPREAD = 0.7, 2.0


def _draw(rng: np.random.Generator, odds: Floats, count: int) -> npt.NDArray[np.uint16]:
    """`count` different experts per layer by log odds [L, E], [L, count] (Gumbel's trick)."""
    noisy = odds + rng.gumbel(size=odds.shape)
    return np.argpartition(-noisy, count - 1, axis=-1)[:, :count].astype(np.uint16)


def _trace(shape: RouteShape, rows: list[npt.NDArray[np.uint16]], texts: list[int]) -> RouteTrace:
    runs = tuple(Run(first, "decode", True) for first in texts)
    return RouteTrace(shape, np.stack(rows), runs)


def zipf_routes(shape: RouteShape, tokens: int, seed: int, exponent: float = 1.0) -> RouteTrace:
    """Odds of rank ** -exponent, in an order of its own for each layer, the same for all tokens."""
    rng = np.random.default_rng(seed)
    ranked = -exponent * np.log(np.arange(1, shape.experts + 1))
    odds = np.stack([rng.permutation(ranked) for _ in range(shape.layers)])
    rows = [_draw(rng, odds, shape.experts_per_token) for _ in range(tokens)]
    return _trace(shape, rows, [0])


def uniform_routes(shape: RouteShape, tokens: int, seed: int) -> RouteTrace:
    """The same odds for all experts."""
    return zipf_routes(shape, tokens, seed, exponent=0.0)


def scan_routes(shape: RouteShape, tokens: int, seed: int) -> RouteTrace:
    """Every token takes the next k experts, around in a circle from a place of its own per layer.

    The worst case of LRU: everything comes back, just after it had to go.
    """
    start = np.random.default_rng(seed).integers(shape.experts, size=shape.layers)[:, None]
    steps = np.arange(shape.experts_per_token)
    rows = [
        ((start + token * shape.experts_per_token + steps) % shape.experts).astype(np.uint16)
        for token in range(tokens)
    ]
    return _trace(shape, rows, [0])


def conversation_routes(
    shape: RouteShape, tokens: int, seed: int, *, mean_tokens: int = 500, half_life: float = 70.0
) -> RouteTrace:
    """Conversations of some hundred tokens, each with favourites of its own that drift.

    Log odds are a weak global preference plus a strong one of the conversation, which forgets half
    of itself within `half_life` tokens.
    """
    rng = np.random.default_rng(seed)
    size = (shape.layers, shape.experts)
    base = rng.normal(scale=_GLOBAL_SPREAD, size=size)
    kept = 2.0 ** (-1.0 / half_life)
    fresh = float(np.sqrt(1.0 - kept**2))
    rows: list[npt.NDArray[np.uint16]] = []
    texts: list[int] = []
    while len(rows) < tokens:
        texts.append(len(rows))
        topic = rng.normal(scale=_TOPIC_SPREAD, size=size)
        length = 50 + int(rng.exponential(mean_tokens - 50))
        for _ in range(min(length, tokens - len(rows))):
            topic = kept * topic + fresh * rng.normal(scale=_TOPIC_SPREAD, size=size)
            rows.append(_draw(rng, base + topic, shape.experts_per_token))
    return _trace(shape, rows, texts)


def _published(shape: RouteShape, tokens: int, seed: int) -> RouteTrace:
    return zipf_routes(shape, tokens, seed, exponent=PUBLISHED_EXPONENT)


def _restless(shape: RouteShape, tokens: int, seed: int) -> RouteTrace:
    return conversation_routes(shape, tokens, seed, mean_tokens=150, half_life=23.0)


def _steady(shape: RouteShape, tokens: int, seed: int) -> RouteTrace:
    return conversation_routes(shape, tokens, seed, mean_tokens=1500, half_life=350.0)


NAMED_ROUTES: MappingProxyType[str, Callable[[RouteShape, int, int], RouteTrace]] = (
    MappingProxyType(
        {
            "zipf": zipf_routes,
            "published": _published,
            "conversations": conversation_routes,
            "restless": _restless,
            "steady": _steady,
            "uniform": uniform_routes,
            "scan": scan_routes,
        }
    )
)
"""Kinds that policies are judged on, by name; called with shape, tokens and seed."""
