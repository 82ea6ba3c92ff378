"""How fast a network of a released shape runs on a GPU, without a file.

Decode is measured as a session runs it: token and position go to the device, the likeliest next
token comes back, one after the other. A depth is a timeline of random rows, so that selections
scatter over it. Beside the speeds stands the rate at which the same process reads memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from edgedsv4.errors import CapacityError
from edgedsv4.kernels._triton import triton
from edgedsv4.kernels.gpu import stream
from edgedsv4.model.gpu_model import GpuModel
from edgedsv4.model.kv_cache import Numerics
from edgedsv4.runtime.benchmark import package_versions
from edgedsv4.runtime.card_reads import read_rate
from edgedsv4.runtime.device import resolve_device
from edgedsv4.runtime.gpu_devices import (
    Gpu,
    check_gpu,
    device_budget,
    device_memory_errors,
    release_unused_memory,
)
from edgedsv4.runtime.host import physical_cores
from edgedsv4.runtime.kernel_profile import profiled
from edgedsv4.runtime.memory_plan import StateLayout, device_workspace_bytes
from edgedsv4.runtime.synthetic_hybrid import (
    HybridRecipe,
    RandomExperts,
    chosen_experts,
    expert_sizes,
    host_facts,
    hybrid_network,
    with_host_share,
)
from edgedsv4.runtime.synthetic_network import (
    EXPERT_TYPES,
    RandomNetwork,
    first_layers,
    network_outline,
    synthetic_config,
)
from edgedsv4.runtime.synthetic_options import PROFILED_TOKENS, WARM_UPS, SyntheticOptions
from edgedsv4.runtime.synthetic_prediction import Expectation, needed_links, synthetic_plan
from edgedsv4.runtime.synthetic_report import (
    KernelTime,
    SyntheticReading,
    SyntheticReport,
    with_traffic,
)
from edgedsv4.runtime.synthetic_traffic import (
    decode_traffic,
    network_bytes,
    operations_per_token,
    prefill_traffic,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgedsv4.config import ModelConfig
    from edgedsv4.model.gpu_cache import GpuKvCache
    from edgedsv4.model.weights import ExpertWeights
    from edgedsv4.runtime.links import Links
    from edgedsv4.runtime.synthetic_network import ExpertTypes
    from edgedsv4.runtime.synthetic_traffic import Traffic

Progress = Callable[[str, int, int], None]
"""Called with (what is measured, steps done, steps in all)."""
OnExpectation = Callable[[Expectation], None]
READ_BYTES = 4 << 30
"""Bytes read to measure the memory, far more than caches hold; less on a small card."""
_E4M3_FINITE = 0xBF
"""Mask that leaves no NaN among random e4m3 codes, and no bfloat16 above 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Who is told of a measurement."""

    on_progress: Progress | None = None
    """Before every step."""
    on_expectation: OnExpectation | None = None
    """What is expected, before anything is built."""


class _NoFile:
    """The experts of a network that no file is behind."""

    is_resident = True

    def check_unchanged(self) -> None:
        """Nothing can change."""

    def fetch(self, layer: int, expert_ids: Sequence[int]) -> list[ExpertWeights]:
        """Nobody asks: the experts are in the network."""
        raise NotImplementedError(f"experts {expert_ids} of layer {layer} are on the device")


class SyntheticModel:
    """A random network with a timeline, ready to run.

    Args:
        config: shape of the model.
        options: what is built and run.
        card: where.
        recipe: what a budget leaves for experts; None looks now.
        experts: that were made before, for `cpu_experts`; they outlive the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: SyntheticOptions,
        card: Gpu,
        recipe: HybridRecipe | None = None,
        experts: RandomExperts | None = None,
    ) -> None:
        self.config = config
        self._has_own_experts = experts is None
        self.device = card.device
        self._capacity = options.capacity_in(config)
        began = time.perf_counter()
        source: Any = _NoFile()
        self.host: dict[str, object] = {}
        if options.cpu_experts is None:
            self.network = RandomNetwork(config, EXPERT_TYPES[options.experts], self.device).make()
        else:
            recipe = recipe or _hybrid_recipe(config, options, card)
            self.network, source, chosen = hybrid_network(config, recipe, self.device, experts)
            self.host = host_facts(recipe, chosen)
        self._source = source
        self.wait()
        self.build_seconds = time.perf_counter() - began
        numerics = Numerics(profile="default", dtype=torch.float32, device=self.device)
        weights: Any = None
        self.model = GpuModel(
            config, weights, source, numerics, network=self.network, family=card.family
        )
        self.cache = self._timeline()

    def close(self) -> None:
        """Give main memory back that experts are in, where they were made for this model."""
        if isinstance(self._source, RandomExperts) and self._has_own_experts:
            self.wait()
            self._source.close()

    def wait(self) -> None:
        """Until the device is done."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def renew(self) -> None:
        """Go on with a new timeline; the old one is given up first."""
        del self.cache
        self.cache = self._timeline()

    def _timeline(self) -> GpuKvCache:
        """A timeline full of noise."""
        cache = self.model.new_cache(self._capacity)
        fill_with_noise(cache)
        self.wait()
        return cache

    def go_to(self, depth: int) -> None:
        """Let the timeline have so many tokens."""
        self.cache.length = depth
        for ring, slots in self.cache.ring_slots:
            ring.oldest = max(0, depth - slots)

    def prefill(self, tokens: int) -> float:
        """Seconds of a prefill of a timeline that was empty."""
        ids = torch.randint(0, self.config.vocab_size, (tokens,))
        self.go_to(0)
        self.wait()
        began = time.perf_counter()
        self.model.forward(ids, self.cache)
        self.wait()
        return time.perf_counter() - began

    def decode(self, tokens: int, depth: int) -> list[float]:
        """Seconds of each of the tokens decoded greedily."""
        self.go_to(depth)
        token = torch.tensor([depth % self.config.vocab_size])
        marks = [time.perf_counter()]
        for _ in range(tokens):
            best = self.model.forward(token, self.cache).best
            token = torch.tensor([best])
            marks.append(time.perf_counter())
        return [after - before for before, after in pairwise(marks)]


def measure_synthetic(
    options: SyntheticOptions | None = None,
    *,
    links: Links | None = None,
    on_progress: Progress | None = None,
    on_expectation: OnExpectation | None = None,
) -> SyntheticReport:
    """Build a network of random weights on a GPU, and measure prefill and decode.

    Args:
        options: what to build and run.
        links: figures that a prediction rests on; None measures them if `options.predict` says so.
        on_progress: told before every step.
        on_expectation: told what is expected before anything is built.

    Raises:
        ConfigError: options that name no model, or more tokens than its context.
        BackendUnavailableError: no GPU, or none that the kernels run on.
        CapacityError: it does not fit in the device's memory; says how many layers would.
        DeviceLostError: the device failed.
    """
    options = options or SyntheticOptions()
    config = synthetic_config(options.name, options.layers)
    options.capacity_in(config)
    card = check_gpu(resolve_device(options.device))
    if options.cpu_experts is None:
        check_room(config, options, device_budget(card.device, options.vram_bytes))
    with device_memory_errors(f"a random network of the shape {options.name}", card.device):
        hooks = Hooks(on_progress=on_progress, on_expectation=on_expectation)
        return measure_network(config, options, card, hooks, links=links)


def check_room(config: ModelConfig, options: SyntheticOptions, budget: int) -> None:
    """Refuse a network that does not fit, before anything is allocated.

    Raises:
        CapacityError: it needs more than `budget` bytes; says how many layers would fit.
    """
    outline = network_outline(config, EXPERT_TYPES[options.experts])
    layers = [network_bytes(layer) for layer in outline.layers]
    rest = network_bytes(outline) - sum(layers)

    def needed(count: int) -> int:
        part = first_layers(config, count)
        state = StateLayout(part).state_bytes(options.capacity_in(part))
        workspace = device_workspace_bytes(part, max(options.prompts, default=1))
        return rest + sum(layers[:count]) + state + workspace

    if needed(config.num_layers) <= budget:
        return
    fitting = next((n for n in range(config.num_layers - 1, 0, -1) if needed(n) <= budget), 0)
    advice = f"take layers {fitting} (--layers {fitting})" if fitting else "not one layer would"
    raise CapacityError(
        f"{options.name} with {options.experts} experts and {config.num_layers} layers does not"
        f" fit in the memory of the device; {advice}",
        needed_bytes=needed(config.num_layers),
        available_bytes=budget,
        is_on_device=True,
    )


def measure_network(
    config: ModelConfig,
    options: SyntheticOptions,
    card: Gpu,
    hooks: Hooks | None = None,
    *,
    links: Links | None = None,
    experts: RandomExperts | None = None,
) -> SyntheticReport:
    """Build and measure a network of any shape; there must be room for it.

    Args:
        config: shape of the model.
        options: what to run; the name is only that of the report.
        card: where.
        hooks: told how it goes.
        links: as `measure_synthetic`.
        experts: as `SyntheticModel`.
    """
    hooks = hooks or Hooks()
    recipe = None if options.cpu_experts is None else _hybrid_recipe(config, options, card)
    expectation = _expectation(config, options, recipe, links, hooks)
    steps = _Steps(options, config, hooks.on_progress)
    steps.next("reading memory")
    read_bytes = _read_bytes(card.device)
    rate = read_rate(card.device, read_bytes)
    release_unused_memory(card.device)
    steps.next("random weights")
    made = SyntheticModel(config, options, card, recipe, experts)
    readings = []
    first = capture = None
    try:
        if options.generate:
            steps.next("first token")
            first = sum(made.decode(1, 0))
            made.renew()
            capture = sum(made.decode(1, 0))
        for depth in options.depths_in(config):
            steps.next(f"decode at {depth:,}")
            readings.append(_decode_reading(made, options, depth))
        for tokens in options.prompts:
            steps.next(f"prefill of {tokens:,}")
            readings.append(_prefill_reading(made, options, tokens))
    finally:
        made.close()
    outline = network_outline(config, EXPERT_TYPES[options.experts])
    return SyntheticReport(
        model=_model_facts(config, options),
        device={"name": card.name, "description": card.description, "family": card.family},
        versions=_versions(),
        weight_bytes=network_bytes(outline),
        operations_per_token=operations_per_token(config, outline),
        host=made.host,
        build_seconds=made.build_seconds,
        read_rate=rate,
        read_bytes=read_bytes,
        first_token_seconds=first,
        capture_seconds=capture,
        readings=tuple(readings),
        expectation=expectation,
    )


def _expectation(
    config: ModelConfig,
    options: SyntheticOptions,
    recipe: HybridRecipe | None,
    links: Links | None,
    hooks: Hooks,
) -> Expectation | None:
    """What the links let expect, told as soon as it is known; None where nobody asked."""
    if links is None and not options.predict:
        return None
    if links is None:
        links = needed_links(config, options, hooks.on_progress or _ignore)
    chosen = None if recipe is None else chosen_experts(config, recipe)
    found = Expectation.of(synthetic_plan(config, options, chosen), options, links)
    if hooks.on_expectation is not None:
        hooks.on_expectation(found)
    return found


def _ignore(_what: str, _done: int, _total: int) -> None:
    """Nobody wants to know of the steps."""


class _Steps:
    """Tells of the steps of a measurement, one after the other."""

    def __init__(
        self, options: SyntheticOptions, config: ModelConfig, report: Progress | None
    ) -> None:
        self._report = report or (lambda _what, _done, _total: None)
        self._done = 0
        decodes = len(options.depths_in(config))
        self._total = 2 + decodes + (1 if decodes else 0) + len(options.prompts)

    def next(self, what: str) -> None:
        """Begin another one."""
        self._report(what, self._done, self._total)
        self._done += 1


def _decode_reading(
    made: SyntheticModel, options: SyntheticOptions, depth: int
) -> SyntheticReading:
    made.decode(WARM_UPS, depth)
    hybrid = made.network.hybrid
    if hybrid is not None:
        seconds, share = with_host_share(hybrid, partial(made.decode, options.generate, depth))
        return SyntheticReading(
            work="decode",
            depth=depth,
            tokens=options.generate,
            seconds=tuple(seconds),
            host=share.per_token(options.generate, expert_sizes(made.config, _types(options))[0]),
        )
    seconds = made.decode(options.generate, depth)
    # Half way through the decode.
    traffic = decode_traffic(made.config, made.network, depth + options.generate // 2)
    kernels: tuple[KernelTime, ...] = ()
    unseen: dict[str, Traffic] = {}
    busy = 0.0
    if options.kernels:
        run = partial(made.decode, PROFILED_TOKENS, depth)
        found, busy = profiled(run, PROFILED_TOKENS, made.device)
        kernels, unseen = with_traffic(found, traffic)
    return SyntheticReading(
        work="decode",
        depth=depth,
        tokens=options.generate,
        seconds=tuple(seconds),
        bytes_per_token=sum(moved.from_memory for moved in traffic.values()),
        kernels=kernels,
        busy_seconds=busy,
        unseen=unseen,
    )


def _prefill_reading(
    made: SyntheticModel, options: SyntheticOptions, tokens: int
) -> SyntheticReading:
    made.prefill(tokens)
    runs = tuple(made.prefill(tokens) for _ in range(options.repeat))
    kernels: tuple[KernelTime, ...] = ()
    unseen: dict[str, Traffic] = {}
    busy = 0.0
    if options.kernels:
        traffic = prefill_traffic(made.config, made.network, tokens)
        found, busy = profiled(partial(made.prefill, tokens), 1, made.device)
        kernels, unseen = with_traffic(found, traffic)
    return SyntheticReading(
        work="prefill",
        depth=0,
        tokens=tokens,
        seconds=runs,
        kernels=kernels,
        busy_seconds=busy,
        unseen=unseen,
    )


def _types(options: SyntheticOptions) -> ExpertTypes:
    return EXPERT_TYPES[options.experts]


def _hybrid_recipe(config: ModelConfig, options: SyntheticOptions, card: Gpu) -> HybridRecipe:
    """What a budget leaves for experts beside everything else."""
    outline = network_outline(config, _types(options))
    experts = sum(network_bytes(layer.experts) for layer in outline.layers)
    others = network_bytes(outline) - experts
    others += StateLayout(config).state_bytes(options.capacity_in(config))
    others += device_workspace_bytes(config, max(options.prompts, default=1))
    budget = 0 if card.device.type == "cpu" else device_budget(card.device, options.vram_bytes)
    return HybridRecipe(
        types=_types(options),
        mode=options.cpu_experts or "auto",
        threads=options.expert_threads or physical_cores(),
        room=max(budget - others, 0) if card.device.type != "cpu" else options.vram_bytes or 0,
    )


def _model_facts(config: ModelConfig, options: SyntheticOptions) -> dict[str, object]:
    types = EXPERT_TYPES[options.experts]
    return {
        "name": options.name,
        "layers": config.num_layers,
        "experts": options.experts,
        "expert_types": list(dict.fromkeys((types.gate_up, types.down))),
    }


def _versions() -> dict[str, str]:
    return {**package_versions(), "triton": str(getattr(triton, "__version__", "not installed"))}


def _read_bytes(device: torch.device) -> int:
    """Bytes to read for the rate of memory: a quarter of what there is, at most `READ_BYTES`."""
    block = 4 * stream.BLOCK
    if device.type == "cpu":
        return block
    return max(block, min(READ_BYTES, device_budget(device, None) // 4) // block * block)


def fill_with_noise(cache: GpuKvCache) -> None:
    """Random rows everywhere, none of them NaN."""
    for layer in cache.layers.values():
        stores = [layer.window.parts]
        for part in (layer.compressor, layer.indexer):
            if part is not None:
                stores += [part.rows.parts, part.raw.parts]
        for parts in stores:
            if parts[0].is_floating_point():
                parts[0].normal_()
                continue
            parts[0].random_(0, 256).bitwise_and_(_E4M3_FINITE)
            parts[1].fill_(126)
