"""How fast a placement decodes and prefills, predicted from what the links carry.

Decode, one token: dense weights are read where they are computed. In each layer the tiers work at
the same time, so the slowest counts: experts in a card's memory at its rate, the others on the CPU
(or copied to the card, if that is faster), and those on the drive have to arrive first. A layer's k
experts fall upon the tiers by chance, so the time of a layer is the expected maximum over all ways
they can fall. It is more than the maximum of the expected times (`bound_tokens_per_second`), which
would need every layer of every token to be an average one.

Prefill, one chunk: a layer's different experts are streamed to where they are computed while the
layer before is computed, so the chunk takes as long as the slowest of streaming, reading the drive
and computing. From some hundred tokens on that is the whole model, whatever the number of tokens.
With few of them the CPU may compute what is not on the card sooner than the bus carries it.

Attention over a long context, launches and everything else that is no link is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from edgedsv4.errors import ConfigError
from edgedsv4.runtime.memory_plan import StateLayout
from edgedsv4.runtime.token_bytes import cache_read_bytes

if TYPE_CHECKING:
    from edgedsv4.runtime.tier_plan import TierPlan

Link = Literal["dense", "exchange", "vram", "cpu", "bus", "drive", "compute"]

EXCHANGE_SECONDS = 45e-6
"""Ids to the host and a row of sums back, per layer, where nobody measured it."""
MOST_DRAWN = 16
"""Experts per token up to which all ways to fall upon tiers are counted; with more of them the
numbers are near their averages."""
_PROMPTS = (512, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Rates that a prediction rests on; 0 is unknown. Bytes or products per second."""

    memory: float
    """Bytes that the CPU reads of main memory."""
    experts: float
    """Bytes of expert weights that the CPU computes for one token: at most `memory`, less where
    decoding them takes longer than reading."""
    products: float
    """Multiplications with an addition of the CPU, for chunks of tokens."""
    drive: float
    """Bytes read of the drive, with as many requests on their way as it takes."""
    vram: float = 0.0
    """Bytes read of the card's memory."""
    to_card: float = 0.0
    """Bytes copied to the card from pinned memory."""
    card_products: float = 0.0
    """Multiplications with an addition of the card."""
    exchange_seconds: float = EXCHANGE_SECONDS

    @property
    def bus(self) -> float:
        """Bytes that reach the card: copies read main memory, and cannot be faster than that."""
        return min(self.to_card, self.memory)

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be a finite rate >= 0, found {value}", name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpeed:
    """One token after another."""

    tokens_per_second: float
    """Expected."""
    bound_tokens_per_second: float
    """If every layer of every token were an average one."""
    seconds: dict[str, float]
    """Of a token, by link; those of experts overlap."""
    limit: Link
    """The link that takes the most of them."""
    ram_path: Literal["cpu", "bus"]
    """Who computes experts outside the card: the CPU, or the card after a copy over the bus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpeed:
    """A prompt, in chunks."""

    tokens: int
    """Of a chunk."""
    tokens_per_second: float
    seconds: dict[str, float]
    """Of a chunk, by link; all of them overlap."""
    limit: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a placement should reach."""

    decode: DecodeSpeed
    prefill: tuple[PrefillSpeed, ...]
    """Of prompts of 512 and 4,096 tokens, or as many as context and chunk allow."""
    shares: tuple[float, float, float]
    """Of selections found in the card's memory, in main memory, on the drive."""
    drive_bytes_per_token: float
    """Read of the drive for each decoded token."""

    def to_json(self) -> dict[str, object]:
        """As JSON types."""
        names = ("vram", "ram", "drive")
        return {
            "decode": {
                "tokens_per_second": self.decode.tokens_per_second,
                "bound_tokens_per_second": self.decode.bound_tokens_per_second,
                "seconds": self.decode.seconds,
                "limit": self.decode.limit,
                "ram_path": self.decode.ram_path,
            },
            "prefill": [
                {
                    "tokens": found.tokens,
                    "tokens_per_second": found.tokens_per_second,
                    "seconds": found.seconds,
                    "limit": found.limit,
                }
                for found in self.prefill
            ],
            "shares": dict(zip(names, self.shares, strict=True)),
            "drive_bytes_per_token": self.drive_bytes_per_token,
        }


def unknown_rates(plan: TierPlan, speeds: Speeds) -> tuple[str, ...]:
    """Names of the rates that a prediction of this plan needs and nobody measured."""
    needed = {"memory": True, "experts": True, "products": not plan.has_card}
    needed["drive"] = any(plan.drive.slots)
    for name in ("vram", "to_card", "card_products"):
        needed[name] = plan.has_card
    return tuple(name for name, is_needed in needed.items() if is_needed and not _of(speeds, name))


def _of(speeds: Speeds, name: str) -> float:
    value: float = getattr(speeds, name)
    return value


def predict(plan: TierPlan, speeds: Speeds, *, depth: int = 0) -> Prediction:
    """Predict decode and prefill.

    Args:
        plan: the placement.
        speeds: of the links; none that the plan needs may be unknown.
        depth: tokens in the timeline when a token is decoded, >= 0; their rows are read, too.

    Raises:
        ConfigError: a rate is unknown, or a negative depth.
    """
    missing = unknown_rates(plan, speeds)
    if missing:
        raise ConfigError(f"a prediction needs rates that are unknown: {', '.join(missing)}")
    if depth < 0:
        raise ConfigError(f"depth must be >= 0, found {depth}", name="depth")
    chunks = sorted({min(tokens, plan.memory.context, plan.chunk) for tokens in _PROMPTS})
    drive_bytes = sum(
        plan.request.config.experts_per_token * share * size
        for share, size in zip(plan.drive.shares, plan.request.cost.expert_bytes, strict=True)
    )
    return Prediction(
        decode=_decode(plan, speeds, depth),
        prefill=tuple(_prefill(plan, speeds, tokens) for tokens in chunks),
        shares=(plan.vram.share, plan.ram.share, plan.drive.share),
        drive_bytes_per_token=drive_bytes,
    )


# ---- decode ----


@dataclass(frozen=True, slots=True)
class _ExpertSeconds:
    """Seconds of one expert by what has to be done with it."""

    vram: float
    """Read by the card."""
    outside: float
    """Computed by the CPU, or copied to the card."""
    drive: float
    """Read from the drive."""

    def of(self, counts: tuple[float, float, float]) -> float:
        """Of a layer with so many experts in each tier."""
        fast, middle, slow = counts
        return max(fast * self.vram, (middle + slow) * self.outside, slow * self.drive)


def _decode(plan: TierPlan, speeds: Speeds, depth: int) -> DecodeSpeed:
    request, card = plan.request, plan.has_card
    state = StateLayout(request.config, request.options.profile, request.options.dtype)
    dense_bytes = request.cost.dense_bytes + cache_read_bytes(state, depth)
    on_cpu = not card or speeds.experts >= speeds.bus
    seconds = {"dense": dense_bytes / (speeds.vram if card else speeds.memory)}
    if card:
        outside_layers = sum(
            any(found) for found in zip(plan.ram.slots, plan.drive.slots, strict=True)
        )
        seconds["exchange"] = outside_layers * speeds.exchange_seconds
    fixed = sum(seconds.values())
    outside = "cpu" if on_cpu else "bus"
    seconds |= {"vram": 0.0, outside: 0.0, "drive": 0.0} if card else {outside: 0.0, "drive": 0.0}
    expected = average = 0.0
    per_token = request.config.experts_per_token
    for layer, size in enumerate(request.cost.expert_bytes):
        shares = tuple(tier.shares[layer] for tier in plan.tiers)
        one = _ExpertSeconds(
            vram=size / speeds.vram if card else 0.0,
            outside=size / (speeds.experts if on_cpu else speeds.bus),
            drive=size / speeds.drive if plan.drive.slots[layer] else 0.0,
        )
        counts = (per_token * shares[0], per_token * shares[1], per_token * shares[2])
        if card:
            seconds["vram"] += counts[0] * one.vram
        seconds[outside] += (counts[1] + counts[2]) * one.outside
        seconds["drive"] += counts[2] * one.drive
        average += one.of(counts)
        expected += _expected_seconds(one, (shares[0], shares[1], shares[2]), per_token)
    return DecodeSpeed(
        tokens_per_second=1 / (fixed + expected),
        bound_tokens_per_second=1 / (fixed + average),
        seconds=seconds,
        limit=_largest(seconds),
        ram_path="cpu" if on_cpu else "bus",
    )


@lru_cache(maxsize=1024)
def _expected_seconds(
    one: _ExpertSeconds, shares: tuple[float, float, float], per_token: int
) -> float:
    """Expected time of a layer whose experts fall upon the tiers independently."""
    if per_token > MOST_DRAWN:
        return one.of((per_token * shares[0], per_token * shares[1], per_token * shares[2]))
    return math.fsum(chance * one.of(counts) for counts, chance in _ways(shares, per_token))


def _ways(
    shares: tuple[float, float, float], count: int
) -> Iterator[tuple[tuple[int, int, int], float]]:
    """Every way that `count` selections can fall upon three tiers, with its probability."""
    for fast in range(count + 1):
        for middle in range(count + 1 - fast):
            slow = count - fast - middle
            ways = math.comb(count, fast) * math.comb(count - fast, middle)
            chance = ways * shares[0] ** fast * shares[1] ** middle * shares[2] ** slow
            if chance:
                yield (fast, middle, slow), chance


def _largest(seconds: dict[str, float]) -> Link:
    names: tuple[Link, ...] = ("dense", "exchange", "vram", "cpu", "bus", "drive", "compute")
    return max(names, key=lambda name: seconds.get(name, 0.0))


# ---- prefill ----


def _prefill(plan: TierPlan, speeds: Speeds, tokens: int) -> PrefillSpeed:
    request, sizes = plan.request, plan.request.cost.expert_bytes
    used = [plan.used(layer, tokens) for layer in range(len(sizes))]
    near = sum(found[0] * size for found, size in zip(used, sizes, strict=True))
    outside = sum((found[1] + found[2]) * size for found, size in zip(used, sizes, strict=True))
    far = sum(found[2] * size for found, size in zip(used, sizes, strict=True))
    pairs = request.config.experts_per_token * len(sizes)
    products = tokens * (request.cost.dense_weights + pairs * request.cost.expert_weights)
    seconds: dict[str, float] = {}
    if plan.has_card:
        # What was copied is read once more by the card that computes it.
        read = request.cost.dense_bytes + near + outside
        seconds["compute"] = max(products / speeds.card_products, read / speeds.vram)
        seconds |= _outside_seconds(plan, speeds, tokens, outside)
    else:
        read = request.cost.dense_bytes + near + outside
        seconds["compute"] = max(products / speeds.products, read / speeds.memory)
    seconds["drive"] = far / speeds.drive if far else 0.0
    limit = _largest(seconds)
    return PrefillSpeed(
        tokens=tokens, tokens_per_second=tokens / seconds[limit], seconds=seconds, limit=limit
    )


def _outside_seconds(
    plan: TierPlan, speeds: Speeds, tokens: int, nbytes: float
) -> dict[str, float]:
    """Seconds of a chunk's experts that are not on the card, by the faster way to compute them."""
    request = plan.request
    per_layer = tokens * request.config.experts_per_token * request.cost.expert_weights
    products = per_layer * sum(1 - share for share in plan.vram.shares)
    over_bus = nbytes / speeds.bus
    if speeds.products:
        on_cpu = max(nbytes / speeds.experts, products / speeds.products)
        if on_cpu < over_bus:
            return {"cpu": on_cpu}
    return {"bus": over_bus}
