"""How fast a placement decodes and prefills, predicted from what the links carry.

Decode, one token: dense weights are read where they are computed, and on a card every launch in a
line costs something beyond that (`card_work`):

    t = dense bytes / memory rate + launches * launch_seconds + sum over layers of the experts' time

In each layer the tiers work at the same time, so the slowest counts. Experts in a card's memory go
at its rate for them. Where some are elsewhere, the token's row goes to the CPU and a row of sums
comes back; the CPU computes n experts in the measured time of a call for n (nothing if none fell to
it), and those on the drive have to arrive first:

    layer = max(n_vram * card, exchange + max(call(n), n_drive * drive))

With `cpu_experts` `on` the card's memory has none for a token; with `off` they travel over the bus
instead, and the card computes all of them afterwards. A layer's k experts fall upon the tiers by
chance, so the time of a layer is the expected maximum over all ways they can fall. It is more than
the maximum of the expected times (`bound_tokens_per_second`), which would need every layer of every
token to be an average one.

Prefill, one chunk of T tokens: a layer's different experts, E (1 - (1 - k/E)^T) of E, are streamed
to where they are computed while the layer before is computed, so the chunk takes as long as the
slowest of streaming, reading the drive and computing. Computing is a sum; on a card, and without
the copies, activations and launches on a CPU, where every block type has its rate of products:

    dense products / product rate + (stored bytes + two bfloat16 copies) / memory rate
    + activations / memory rate + products of attention / product rate + launches
    + weights of the experts * measured seconds of a weight at T k / U tokens each

From some hundred tokens on that is the whole model, whatever the number of tokens. With few of them
the CPU may compute what is not on the card sooner than the bus carries it; then a layer's other
work has to wait for it, and the times add up.

Attention over a long context and everything else that is no link is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, get_args

from edgedsv4.errors import ConfigError
from edgedsv4.runtime.card_work import (
    activation_bytes,
    attention_products,
    chunk_launches,
    token_launches,
)
from edgedsv4.runtime.memory_plan import StateLayout
from edgedsv4.runtime.rate_curves import seconds_between, seconds_of_call
from edgedsv4.runtime.token_bytes import cache_read_bytes

if TYPE_CHECKING:
    from edgedsv4.runtime.tier_plan import TierPlan

Link = Literal["dense", "launches", "exchange", "vram", "cpu", "bus", "drive", "compute"]
LINKS: tuple[Link, ...] = get_args(Link)
Points = tuple[tuple[float, float], ...]
"""(tokens of an expert, seconds of a stored weight), by tokens."""

EXCHANGE_SECONDS = 45e-6
"""Ids to the host and a row of sums back, per layer, where nobody measured it."""
MOST_DRAWN = 16
"""Experts per token up to which all ways to fall upon tiers are counted; with more of them the
numbers are near their averages."""
_PROMPTS = (512, 4096)
_POINTS = ("calls", "cpu_chunk", "card_chunk")


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
    dense_products: float = 0.0
    """The same with the dense weights; 0 takes `products`."""
    float_products: float = 0.0
    """The same with cached rows, of float32 activations; 0 takes `dense_products`."""
    drive: float
    """Bytes read of the drive, with as many requests on their way as it takes."""
    vram: float = 0.0
    """Bytes read of the card's memory."""
    to_card: float = 0.0
    """Bytes copied to the card from pinned memory."""
    card_products: float = 0.0
    """Multiplications with an addition of the card."""
    exchange_seconds: float = EXCHANGE_SECONDS
    launch_seconds: float = 0.0
    """Of a launch of a recorded step on the card, beyond reading."""
    overlapped_launch_seconds: float = 0.0
    """The same where all experts are on the card, so that launches overlap."""
    card_experts: float = 0.0
    """Bytes of expert weights that the card computes for one token; 0 takes `vram`."""
    calls: Points = field(default=(), kw_only=True)
    """(weights, seconds) of a call of the CPU beside a card; none goes by `experts`."""
    cpu_chunk: Points = field(default=(), kw_only=True)
    """Experts of a chunk on the CPU; none goes by `experts` and `products`."""
    card_chunk: Points = field(default=(), kw_only=True)
    """Experts of a chunk on the card; none goes by `vram` and `card_products`."""

    @property
    def bus(self) -> float:
        """Bytes that reach the card: copies read main memory, and cannot be faster than that."""
        return min(self.to_card, self.memory)

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            values = [each for pair in value for each in pair] if name in _POINTS else [value]
            if not all(0 <= each < math.inf for each in values):
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


def predict(
    plan: TierPlan, speeds: Speeds, *, depth: int = 0, prompts: tuple[int, ...] = ()
) -> Prediction:
    """Predict decode and prefill.

    Args:
        plan: the placement.
        speeds: of the links; none that the plan needs may be unknown.
        depth: tokens in the timeline when a token is decoded, >= 0; their rows are read, too.
        prompts: of so many tokens; none takes 512 and 4,096.

    Raises:
        ConfigError: a rate is unknown, or a negative depth.
    """
    missing = unknown_rates(plan, speeds)
    if missing:
        raise ConfigError(f"a prediction needs rates that are unknown: {', '.join(missing)}")
    if depth < 0:
        raise ConfigError(f"depth must be >= 0, found {depth}", name="depth")
    chunks = sorted(
        {min(tokens, plan.memory.context, plan.chunk) for tokens in prompts or _PROMPTS}
    )
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
    """Seconds of one expert by what has to be done with it, and of what goes with a layer."""

    vram: float
    """Computed by the card."""
    outside: float
    """Computed by the CPU, or copied to the card."""
    drive: float
    """Read from the drive."""
    exchange: float = 0.0
    """Of the layer, whoever computes."""
    calls: Points = ()
    """Of so many weights computed by the CPU in one call; none goes by `outside`."""
    weights: int = 0
    """Elements of an expert."""
    is_serial: bool = False
    """The card computes all of them, once they were copied."""

    def of(self, counts: tuple[float, float, float]) -> float:
        """Of a layer with so many experts in each tier."""
        fast, middle, slow = counts
        far = self.exchange + max(self.elsewhere(middle + slow), slow * self.drive)
        if self.is_serial:
            return far + (fast + middle + slow) * self.vram
        return max(fast * self.vram, far)

    def elsewhere(self, count: float) -> float:
        """Of so many experts that the CPU computes, or that are copied."""
        if self.calls and count:
            return seconds_of_call(self.calls, count * self.weights)
        return count * self.outside


@dataclass(frozen=True, slots=True)
class _Decoding:
    """Who computes the experts of a token, and how fast."""

    plan: TierPlan
    speeds: Speeds

    @property
    def mode(self) -> str:
        """What the CPU computes; of a model without a card everything."""
        return self.plan.request.options.cpu_experts if self.plan.has_card else "on"

    @property
    def is_by_cpu(self) -> bool:
        return self.mode != "off"

    @property
    def is_hybrid(self) -> bool:
        """Whether not all of a card's token is computed by the card."""
        plan = self.plan
        return plan.has_card and (self.mode == "on" or any((*plan.ram.slots, *plan.drive.slots)))

    def shares(self, layer: int) -> tuple[float, float, float]:
        """Of a layer's selections, where they are computed from."""
        near, middle, far = (tier.shares[layer] for tier in self.plan.tiers)
        if self.plan.has_card and self.mode == "on":
            return 0.0, near + middle, far
        return near, middle, far

    def one(self, layer: int) -> _ExpertSeconds:
        """Seconds of the experts of a layer."""
        plan, speeds = self.plan, self.speeds
        size = plan.request.cost.expert_bytes[layer]
        is_whole = not (plan.ram.slots[layer] or plan.drive.slots[layer] or self.mode == "on")
        has_exchange = plan.has_card and not is_whole
        return _ExpertSeconds(
            vram=size / (speeds.card_experts or speeds.vram) if plan.has_card else 0.0,
            outside=size / (speeds.experts if self.is_by_cpu else speeds.bus),
            drive=size / speeds.drive if plan.drive.slots[layer] else 0.0,
            exchange=speeds.exchange_seconds if has_exchange else 0.0,
            calls=speeds.calls if has_exchange and self.is_by_cpu else (),
            weights=plan.request.cost.expert_weights,
            is_serial=plan.has_card and not self.is_by_cpu,
        )


def _decode(plan: TierPlan, speeds: Speeds, depth: int) -> DecodeSpeed:
    request, card = plan.request, plan.has_card
    state = StateLayout(request.config, request.options.profile, request.options.dtype)
    dense_bytes = request.cost.dense_bytes + cache_read_bytes(state, depth)
    who = _Decoding(plan, speeds)
    seconds = {"dense": dense_bytes / (speeds.vram if card else speeds.memory)}
    if card:
        each = speeds.launch_seconds if who.is_hybrid else speeds.overlapped_launch_seconds
        seconds["launches"] = each * token_launches(request.config, depth)
    fixed = sum(seconds.values())
    outside = "cpu" if who.is_by_cpu else "bus"
    seconds |= {"exchange": 0.0, "vram": 0.0} if card else {}
    seconds |= {outside: 0.0, "drive": 0.0}
    expected = average = 0.0
    per_token = request.config.experts_per_token
    for layer in range(len(request.cost.expert_bytes)):
        shares, one = who.shares(layer), who.one(layer)
        counts = (per_token * shares[0], per_token * shares[1], per_token * shares[2])
        elsewhere = counts[1] + counts[2]
        if card:
            seconds["exchange"] += one.exchange
            seconds["vram"] += (per_token if one.is_serial else counts[0]) * one.vram
        seconds[outside] += one.elsewhere(elsewhere)
        seconds["drive"] += counts[2] * one.drive
        average += one.of(counts)
        expected += _expected_seconds(one, shares, per_token)
    return DecodeSpeed(
        tokens_per_second=1 / (fixed + expected),
        bound_tokens_per_second=1 / (fixed + average),
        seconds=seconds,
        limit=_largest(seconds),
        ram_path="cpu" if who.is_by_cpu else "bus",
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
    return max(LINKS, key=lambda name: seconds.get(name, 0.0))


# ---- prefill ----


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The experts of a chunk by where they lie: different ones, and pairs with tokens."""

    plan: TierPlan
    tokens: int

    def used(self, layer: int) -> tuple[float, float, float]:
        """Different experts of a layer, by tier."""
        return self.plan.used(layer, self.tokens)

    def pairs(self, layer: int, first: int, last: int) -> float:
        """Pairs of a token and an expert in tiers first .. last - 1."""
        shares = sum(tier.shares[layer] for tier in self.plan.tiers[first:last])
        return self.tokens * self.plan.request.config.experts_per_token * shares

    def nbytes(self, first: int, last: int) -> float:
        """Bytes of the different experts in those tiers."""
        sizes = enumerate(self.plan.request.cost.expert_bytes)
        return sum(sum(self.used(layer)[first:last]) * size for layer, size in sizes)

    def seconds(self, points: Points, first: int, last: int) -> float:
        """Of computing the experts of those tiers."""
        weights, found = self.plan.request.cost.expert_weights, 0.0
        for layer in range(len(self.plan.request.cost.expert_bytes)):
            used = sum(self.used(layer)[first:last])
            if used:
                each = self.pairs(layer, first, last) / used
                found += used * weights * seconds_between(points, each)
        return found

    def products(self, first: int, last: int) -> float:
        """Multiplications with an addition by the experts of those tiers."""
        layers = range(len(self.plan.request.cost.expert_bytes))
        pairs = sum(self.pairs(layer, first, last) for layer in layers)
        return pairs * self.plan.request.cost.expert_weights


def _prefill(plan: TierPlan, speeds: Speeds, tokens: int) -> PrefillSpeed:
    chunk = _Chunk(plan, tokens)
    seconds, total = (_on_card if plan.has_card else _on_cpu)(chunk, speeds)
    far = chunk.nbytes(2, 3)
    seconds["drive"] = far / speeds.drive if far else 0.0
    total = max(total, seconds["drive"])
    return PrefillSpeed(
        tokens=tokens, tokens_per_second=tokens / total, seconds=seconds, limit=_largest(seconds)
    )


def _on_cpu(chunk: _Chunk, speeds: Speeds) -> tuple[dict[str, float], float]:
    """Seconds of a chunk without a card, by link and in all."""
    request = chunk.plan.request
    cost, dense = request.cost, speeds.dense_products or speeds.products
    products = chunk.tokens * cost.dense_weights / dense
    attention = attention_products(request.config, chunk.tokens)
    products += attention / (speeds.float_products or dense)
    if speeds.cpu_chunk:
        products += chunk.seconds(speeds.cpu_chunk, 0, 3)
    else:
        products += chunk.products(0, 3) / speeds.products
    compute = max(products, (cost.dense_bytes + chunk.nbytes(0, 3)) / speeds.memory)
    return {"compute": compute}, compute


def _on_card(chunk: _Chunk, speeds: Speeds) -> tuple[dict[str, float], float]:
    """Seconds of a chunk with a card, by link and in all."""
    dense = _dense_on_card(chunk, speeds)
    outside = chunk.nbytes(1, 3)
    mode = chunk.plan.request.options.cpu_experts
    if outside and mode != "off":
        first = 0 if mode == "on" else 1
        on_cpu = _by_cpu(chunk, speeds, first)
        if on_cpu < chunk.nbytes(first, 3) / speeds.bus:
            near = _by_card(chunk, speeds, first)
            return {"compute": dense + near, "cpu": on_cpu}, dense + max(near, on_cpu)
    compute = dense + _by_card(chunk, speeds, 3)
    if not outside:
        return {"compute": compute}, compute
    bus = outside / speeds.bus
    return {"compute": compute, "bus": bus}, max(compute, bus)


def _dense_on_card(chunk: _Chunk, speeds: Speeds) -> float:
    """Everything of a chunk but its routed experts; weights become bfloat16 once per chunk."""
    request, tokens = chunk.plan.request, chunk.tokens
    cost, config = request.cost, request.config
    products = tokens * cost.dense_weights + attention_products(config, tokens)
    moved = cost.dense_bytes + 4 * cost.dense_weights + tokens * activation_bytes(config)
    launches = chunk_launches(config) * speeds.launch_seconds
    return products / speeds.card_products + moved / speeds.vram + launches


def _by_card(chunk: _Chunk, speeds: Speeds, last: int) -> float:
    """Experts of the tiers before `last`, computed by the card."""
    if speeds.card_chunk:
        return chunk.seconds(speeds.card_chunk, 0, last)
    return max(chunk.products(0, last) / speeds.card_products, chunk.nbytes(0, last) / speeds.vram)


def _by_cpu(chunk: _Chunk, speeds: Speeds, first: int) -> float:
    """Experts of the tiers from `first` on, computed by the CPU; endless without its rates."""
    if speeds.cpu_chunk:
        return chunk.seconds(speeds.cpu_chunk, first, 3)
    if not speeds.products:
        return math.inf
    by_reading = chunk.nbytes(first, 3) / speeds.experts
    return max(by_reading, chunk.products(first, 3) / speeds.products)
