"""What to tell a user about a placement: how fast it should be, what limits it, what would help.

`plan_tiers` reads the header of a model and the figures of a machine; `compare` holds what a run
reached against what was predicted before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgedsv4.errors import ConfigError
from edgedsv4.model.weight_table import bind_weights
from edgedsv4.runtime.host import available_ram_bytes
from edgedsv4.runtime.memory_plan import GPU_CHUNKS, weight_items
from edgedsv4.runtime.shipped_models import open_model
from edgedsv4.runtime.store_plan import choose_store
from edgedsv4.runtime.tier_plan import (
    TierPlan,
    TierRequest,
    TokenCost,
    place_experts,
    with_store,
)
from edgedsv4.runtime.tier_rates import speeds_of
from edgedsv4.runtime.tier_speed import (
    Prediction,
    Speeds,
    predict,
    unknown_rates,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edgedsv4.config import EngineOptions
    from edgedsv4.model.bound_weights import BoundWeights
    from edgedsv4.runtime.links import DriveRate, Links

WORTH_TELLING = 1.1
"""A change is told when it makes decode or prefill this many times as fast."""
_STEP_BYTES = 16 << 30
_RATE_NAMES = {
    "memory": "reads of memory",
    "experts": "experts on the CPU",
    "products": "experts on the CPU",
    "drive": "the drive that holds the model (--path)",
    "vram": "a card",
    "to_card": "a card",
    "card_products": "a card",
}
_LIMITS = {
    "launches": "launches on the card",
    "dense": "reading the dense weights",
    "exchange": "exchanges between card and CPU",
    "vram": "the card's memory",
    "cpu": "experts on the CPU",
    "bus": "copies to the card",
    "drive": "the drive",
    "compute": "computing",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """A placement with everything that can be said of it."""

    plan: TierPlan
    prediction: Prediction | None
    """None where rates are missing."""
    missing: tuple[str, ...]
    """What has to be measured for a prediction."""
    advice: tuple[str, ...]
    """What would make it faster, the most effective for decode first."""
    why_mapped: str = ""
    """Why experts that do not fit are not stored, as a sentence; else empty."""

    def to_json(self) -> dict[str, object]:
        """The memory plan's keys, and those of the placement beside them."""
        return {
            **self.plan.memory.to_json(),
            "experts_fit": not any(self.plan.drive.slots),
            "placement": self.plan.to_json(),
            "prediction": None if self.prediction is None else self.prediction.to_json(),
            "missing_links": list(self.missing),
            "advice": list(self.advice),
            "store": self._store_json(),
        }

    def _store_json(self) -> dict[str, object] | None:
        """The store's own lines and how it reads; None where files are mapped."""
        store, options = self.plan.store, self.plan.request.options
        if store is None:
            return None
        how = {"io": options.io, "io_depth": options.io_depth, "prefetch": options.prefetch}
        return {**store.to_json(), **how}


def plan_tiers(
    model: str | Path,
    options: EngineOptions,
    *,
    links: Links | None = None,
    counts: Sequence[Sequence[int]] | None = None,
) -> TierReport:
    """Place a model's experts, without a look at the weights, and predict its speed.

    Budgets are `options.vram_bytes` and `options.ram_bytes`, which may be those of another machine.
    Without the first, a card takes part if `links` has one and `options.device` is no CPU.

    Args:
        model: as `Engine.open`.
        options: budgets, context, profile, chunk and drafts count.
        links: figures of the machine; None predicts nothing.
        counts: how often each expert was selected, [layers][experts].

    Raises:
        FormatError: when the header cannot be read or its tensors do not fit the configuration.
        ConfigError: an option out of range, or counts of another model.
    """
    with open_model(model, options) as checkpoint:
        bound = bind_weights(checkpoint)
        limit = checkpoint.config.max_context
        if options.context is not None and options.context > limit:
            raise ConfigError(
                f"context must be 1..{limit} for {checkpoint.path}, found {options.context}"
            )
        request = TierRequest(
            config=bound.config,
            weights=_weight_bytes(bound),
            cost=TokenCost.of(bound),
            options=options,
            vram_bytes=_vram_budget(options, links),
            ram_bytes=options.ram_bytes or max(1, available_ram_bytes()),
            counts=counts,
        )
        drive = None if links is None else links.drive_of(checkpoint.path)
        plan, why = place_experts(request), ""
        if not plan.has_card:
            choice = choose_store(
                bound.config, request.weights, options, bound.experts, plan.memory
            )
            why = choice.why
            if choice.store is not None:
                plan = with_store(plan, choice.memory, choice.store)
    return replace(report_plan(plan, links, drive), why_mapped=why)


def _weight_bytes(bound: BoundWeights) -> dict[str, int]:
    return weight_items(_sizes(bound))


def _sizes(bound: BoundWeights) -> Iterator[tuple[str, int]]:
    yield from ((role, tensor.nbytes) for role, tensor in bound.tensors.items())
    for layer, experts in enumerate(bound.experts):
        place = "draft" if layer == bound.config.num_layers else f"layers.{layer}"
        for matrix in (*experts.w1, *experts.w3, *experts.w2):
            yield f"{place}.ffn.experts.w", matrix.nbytes


def _vram_budget(options: EngineOptions, links: Links | None) -> int | None:
    """Bytes that may be used of a card; None where none takes part.

    Raises:
        ConfigError: a card was named, and nothing tells what it has.
    """
    if options.device == "cpu":
        return None
    if options.vram_bytes is not None:
        return options.vram_bytes
    if links is not None and links.card is not None:
        return links.card.free_bytes
    if options.device != "auto":
        raise ConfigError(
            f"device {options.device}: nothing tells what memory it has; give --vram, or measure it"
            " with `edgedsv4 bench links`",
            name="device",
        )
    return None


def report(request: TierRequest, links: Links | None, drive: DriveRate | None) -> TierReport:
    """Place experts, and predict and advise where the figures are there."""
    return report_plan(place_experts(request), links, drive)


def report_plan(plan: TierPlan, links: Links | None, drive: DriveRate | None) -> TierReport:
    """Predict and advise for a placement that is given, where the figures are there."""
    request = plan.request
    if links is None:
        return TierReport(plan=plan, prediction=None, missing=("everything",), advice=())
    speeds = speeds_of(
        links,
        request.cost.block_types,
        drive,
        has_card=plan.has_card,
        dense_types=request.cost.dense_types,
    )
    missing = tuple(dict.fromkeys(_RATE_NAMES[name] for name in unknown_rates(plan, speeds)))
    if missing:
        return TierReport(plan=plan, prediction=None, missing=missing, advice=())
    return TierReport(
        plan=plan,
        prediction=predict(plan, speeds),
        missing=(),
        advice=advise(plan, speeds),
    )


# ---- what would help ----


def advise(plan: TierPlan, speeds: Speeds) -> tuple[str, ...]:
    """Changes that would make it faster, and how much; the best for decode first."""
    now = predict(plan, speeds)
    changes = [*_decode_changes(plan, speeds), *_prefill_changes(plan, speeds)]
    told = []
    for what, then in changes:
        decode = then.decode.tokens_per_second / now.decode.tokens_per_second
        prefill = then.prefill[-1].tokens_per_second / now.prefill[-1].tokens_per_second
        if max(decode, prefill) >= WORTH_TELLING:
            told.append((-decode, -prefill, _sentence(what, now, then)))
    texts = [text for *_, text in sorted(told)]
    return (*texts, *_kernel_note(plan, speeds, now))


def _sentence(what: str, now: Prediction, then: Prediction) -> str:
    before, after = now.prefill[-1], then.prefill[-1]
    return (
        f"{what}: decode {then.decode.tokens_per_second:,.1f} instead of"
        f" {now.decode.tokens_per_second:,.1f} tokens/s, prefill {after.tokens_per_second:,.0f}"
        f" instead of {before.tokens_per_second:,.0f}"
    )


def _same_context(plan: TierPlan) -> TierRequest:
    """The request with the context that was planned, so that a change changes nothing else."""
    request = plan.request
    options = replace(request.options, context=plan.memory.context, prefill_chunk=plan.chunk)
    return replace(request, options=options)


def _decode_changes(plan: TierPlan, speeds: Speeds) -> Iterator[tuple[str, Prediction]]:
    """More memory, a faster drive."""
    request = _same_context(plan)
    if any(plan.drive.slots):
        enough = plan.ram_bytes - plan.ram_staging_bytes + plan.drive.nbytes
        whole = place_experts(replace(request, ram_bytes=enough))
        what = f"--ram {_gib(enough)}, which holds every expert"
        yield what, predict(whole, speeds)
        faster = replace(speeds, drive=2 * speeds.drive)
        yield "a drive of twice the rate", predict(plan, faster)
    if request.vram_bytes is not None and any((*plan.ram.slots, *plan.drive.slots)):
        more = request.vram_bytes + _STEP_BYTES
        larger = place_experts(replace(request, vram_bytes=more))
        yield f"--vram {_gib(more)}", predict(larger, speeds)


def _prefill_changes(plan: TierPlan, speeds: Speeds) -> Iterator[tuple[str, Prediction]]:
    """A larger chunk, where what is streamed for each takes the time."""
    largest = max(GPU_CHUNKS)
    if plan.chunk < largest:
        request = _same_context(plan)
        options = replace(request.options, prefill_chunk=largest)
        changed = place_experts(replace(request, options=options))
        if changed.memory.fits:
            yield f"--chunk {largest}", predict(changed, speeds)


def _kernel_note(plan: TierPlan, speeds: Speeds, now: Prediction) -> tuple[str, ...]:
    """Said where the CPU's kernels, not memory, bound decode."""
    share = speeds.experts / speeds.memory
    if now.decode.limit != "cpu" or share >= 1 / WORTH_TELLING**3:
        return ()
    types = ", ".join(sorted(plan.request.cost.block_types))
    return (
        f"experts of type {types} take {1 / share:,.1f} times as long as reading them: more or"
        " faster cores would help, faster memory would not",
    )


def _gib(nbytes: int) -> str:
    return f"{-(-nbytes // (1 << 30))}G"


def limit_text(limit: str) -> str:
    """What a link is called in a sentence."""
    return _LIMITS[limit]


# ---- afterwards ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run reached; None is what it did not do."""

    decode_tokens_per_second: float | None = None
    prefill_tokens_per_second: float | None = None
    prefill_tokens: int = 0
    """Of the prompt that was evaluated."""
    hits: tuple[int, int, int] | None = None
    """Selections found in the card's memory, in main memory, on the drive."""
    drive_bytes_per_token: float | None = None


@dataclass(frozen=True, slots=True)
class Deviation:
    """One figure beside its prediction."""

    name: str
    predicted: float
    found: float

    @property
    def ratio(self) -> float | None:
        """Found, of what was predicted; None where that was 0."""
        return self.found / self.predicted if self.predicted else None

    def __str__(self) -> str:
        share = "" if self.ratio is None else f" ({self.ratio:.0%})"
        return f"{self.name} {self.found:,.4g}, predicted {self.predicted:,.4g}{share}"


def compare(prediction: Prediction, outcome: Outcome) -> tuple[Deviation, ...]:
    """Hold a run against what was predicted, figure by figure, for what it did.

    Raises:
        ConfigError: hits that are negative.
    """
    found = []
    if outcome.decode_tokens_per_second is not None:
        expected = prediction.decode.tokens_per_second
        found.append(Deviation("decode tokens/s", expected, outcome.decode_tokens_per_second))
    if outcome.prefill_tokens_per_second is not None:
        nearest = min(prediction.prefill, key=lambda p: abs(p.tokens - outcome.prefill_tokens))
        found.append(
            Deviation(
                f"prefill tokens/s (predicted for {nearest.tokens:,} tokens)",
                nearest.tokens_per_second,
                outcome.prefill_tokens_per_second,
            )
        )
    found += _hit_deviations(prediction, outcome.hits)
    if outcome.drive_bytes_per_token is not None:
        expected = prediction.drive_bytes_per_token
        found.append(Deviation("drive bytes per token", expected, outcome.drive_bytes_per_token))
    return tuple(found)


def _hit_deviations(
    prediction: Prediction, hits: tuple[int, int, int] | None
) -> Iterator[Deviation]:
    if hits is None:
        return
    if min(hits) < 0:
        raise ConfigError(f"hits must be numbers >= 0, found {hits}", name="hits")
    total = max(1, sum(hits))
    for name, expected, count in zip(
        ("VRAM", "RAM", "the drive"), prediction.shares, hits, strict=True
    ):
        if expected or count:
            yield Deviation(f"share in {name}", expected, count / total)
