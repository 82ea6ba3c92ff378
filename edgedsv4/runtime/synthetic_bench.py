"""How fast a network of a released shape runs on a GPU, without a file.

Decode is measured as a session runs it: token and position go to the device, the likeliest next
token comes back, one after the other. A depth is a timeline of random rows, so that selections
scatter over it. Beside the speeds stands the rate at which the same process reads memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from edgedsv4.errors import ConfigError
from edgedsv4.kernels.gpu import stream
from edgedsv4.model.gpu_model import GpuModel
from edgedsv4.model.kv_cache import Numerics
from edgedsv4.runtime.memory_plan import StateLayout
from edgedsv4.runtime.synthetic_network import (
    EXPERT_TYPES,
    ExpertRecipe,
    RandomNetwork,
    SyntheticName,
    synthetic_config,
)
from edgedsv4.runtime.token_bytes import cache_read_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgedsv4.config import ModelConfig
    from edgedsv4.model.gpu_cache import GpuKvCache
    from edgedsv4.model.gpu_network import DeviceNetwork
    from edgedsv4.model.weights import ExpertWeights

Progress = Callable[[str, int, int], None]
"""Called with (what is measured, steps done, steps in all)."""
READ_BYTES = 4 << 30
_READS = 7
_PROFILED_TOKENS = 5
_E4M3_FINITE = 0xBF
"""Mask that leaves no NaN among random e4m3 codes, and no bfloat16 above 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticOptions:
    """What `measure_synthetic` builds and runs."""

    name: SyntheticName = "flash"
    experts: ExpertRecipe = "q2"
    layers: int | None = None
    """First layers only; None takes all."""
    device: str = "cuda"
    prompts: tuple[int, ...] = (512, 4096)
    """Tokens of a prefill."""
    generate: int = 100
    """Tokens of a decode."""
    depths: tuple[int, ...] = (0, 16_384, 65_536, 262_144, 1_000_000)
    """Tokens in the timeline before."""
    repeat: int = 3
    """Runs of a prefill that count, after one that does not."""

    def __post_init__(self) -> None:
        if self.experts not in EXPERT_TYPES:
            kinds = ", ".join(EXPERT_TYPES)
            raise ConfigError(f"experts must be one of {kinds}, found {self.experts!r}")
        for name, low in {"generate": 0, "repeat": 1}.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be >= {low}, found {getattr(self, name)}")
        if any(tokens < 1 for tokens in self.prompts):
            raise ConfigError(f"prompts must be numbers >= 1, found {self.prompts}")
        if not self.depths or min(self.depths) < 0:
            raise ConfigError(f"depths must be one or more numbers >= 0, found {self.depths}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticReading:
    """The runs of one kind of work."""

    work: str
    depth: int
    tokens: int
    seconds: tuple[float, ...]
    """Of each token of a decode, of each run of a prefill."""
    bytes_per_token: int | None
    """What a decoded token has to read."""

    @property
    def rate(self) -> float:
        """Tokens per second: of all tokens of a decode, of the median prefill."""
        if self.work == "decode":
            return len(self.seconds) / sum(self.seconds)
        return self.tokens / statistics.median(self.seconds)

    def share(self, read_rate: float) -> float | None:
        """Bytes read per second, of the rate that memory allows."""
        return (
            None if self.bytes_per_token is None else self.rate * self.bytes_per_token / read_rate
        )

    def to_json(self) -> dict[str, object]:
        """The reading as JSON types."""
        ordered = sorted(self.seconds)
        return {
            "work": self.work,
            "depth": self.depth,
            "tokens": self.tokens,
            "tokens_per_second": self.rate,
            "median_seconds": statistics.median(ordered),
            "p99_seconds": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
            "bytes_per_token": self.bytes_per_token,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """All launches of one kernel within one step."""

    name: str
    launches: int
    seconds: float
    """On the device."""
    nbytes: int | None
    """What the launches have to read, where that is known."""


@dataclass(slots=True, kw_only=True)
class SyntheticReport:
    """What was measured."""

    options: SyntheticOptions
    weight_bytes: int
    build_seconds: float
    read_rate: float
    """Bytes per second."""
    capture_seconds: float = 0.0
    """First decoded token: compilation, warming up and capture."""
    readings: list[SyntheticReading] = field(default_factory=list)
    kernels: dict[str, list[KernelTime]] = field(default_factory=dict)
    """By work: `decode`, `prefill N`."""


class _NoFile:
    """The experts of a network that no file is behind."""

    is_resident = True

    def check_unchanged(self) -> None:
        """Nothing can change."""

    def fetch(self, layer: int, expert_ids: Sequence[int]) -> list[ExpertWeights]:
        """Nobody asks: the experts are in the network."""
        raise NotImplementedError(f"experts {expert_ids} of layer {layer} are on the device")


class SyntheticModel:
    """A random network with a timeline, ready to run."""

    def __init__(self, options: SyntheticOptions) -> None:
        self.options = options
        self.config = synthetic_config(options.name, options.layers)
        self.device = torch.device(options.device)
        began = time.perf_counter()
        recipe = RandomNetwork(self.config, EXPERT_TYPES[options.experts], self.device)
        self.network = recipe.make()
        self.wait()
        self.build_seconds = time.perf_counter() - began
        numerics = Numerics(profile="default", dtype=torch.float32, device=self.device)
        weights: Any = None
        self.model = GpuModel(
            self.config,
            weights,
            _NoFile(),
            numerics,
            network=self.network,
            family=family_of(self.device),
        )
        self.capacity = max(options.depths) + max(options.generate, *options.prompts) + 64
        self.cache: GpuKvCache = self.model.new_cache(self.capacity)
        fill_with_noise(self.cache)

    def wait(self) -> None:
        """Until the device is done."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def go_to(self, depth: int) -> None:
        """Let the timeline have so many tokens."""
        self.cache.length = depth
        for ring, slots in self.cache.ring_slots:
            ring.oldest = max(0, depth - slots)

    def prefill(self, tokens: int, depth: int) -> float:
        """Seconds of a prefill."""
        ids = torch.randint(0, self.config.vocab_size, (tokens,))
        self.go_to(depth)
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
    options: SyntheticOptions, on_progress: Progress | None = None
) -> SyntheticReport:
    """Build a network and measure it.

    Raises:
        ConfigError: options that name no model.
        CapacityError: it does not fit in the device's memory.
    """
    report_progress = on_progress or (lambda _what, _done, _total: None)
    rate = read_rate(torch.device(options.device))
    report_progress("random weights", 0, 1)
    made = SyntheticModel(options)
    report = SyntheticReport(
        options=options,
        weight_bytes=made.network.nbytes(),
        build_seconds=made.build_seconds,
        read_rate=rate,
    )
    report.capture_seconds = sum(made.decode(1, 0))
    for place, depth in enumerate(options.depths if options.generate else ()):
        report_progress(f"decode at {depth:,}", place, len(options.depths))
        made.decode(3, depth)
        seconds = made.decode(options.generate, depth)
        nbytes = token_bytes(made.config, made.network, depth)
        report.readings.append(
            SyntheticReading(
                work="decode",
                depth=depth,
                tokens=options.generate,
                seconds=tuple(seconds),
                bytes_per_token=sum(nbytes.values()),
            )
        )
        kernels = profile(partial(made.decode, _PROFILED_TOKENS, depth), _PROFILED_TOKENS)
        report.kernels[f"decode at {depth}"] = _with_bytes(kernels, nbytes)
    for place, tokens in enumerate(options.prompts):
        report_progress(f"prefill of {tokens:,}", place, len(options.prompts))
        made.prefill(tokens, 0)
        runs = tuple(made.prefill(tokens, 0) for _ in range(options.repeat))
        report.readings.append(
            SyntheticReading(
                work="prefill", depth=0, tokens=tokens, seconds=runs, bytes_per_token=None
            )
        )
        report.kernels[f"prefill of {tokens}"] = profile(partial(made.prefill, tokens, 0), 1)
    return report


def read_rate(device: torch.device) -> float:
    """Bytes per second of the best of several reads of a large tensor."""
    words = torch.empty(READ_BYTES // 4, dtype=torch.int32, device=device)
    words.random_()
    out = torch.zeros(1, dtype=torch.int32, device=device)
    best = float("inf")
    for _ in range(_READS):
        first: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        last: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        first.record()
        stream.read_all(out, words)
        last.record()
        last.synchronize()
        best = min(best, first.elapsed_time(last) / 1e3)
    return READ_BYTES / best


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


def family_of(device: torch.device) -> str:
    """Name of the device's family in tables of tile sizes."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def token_bytes(config: ModelConfig, network: DeviceNetwork, depth: int) -> dict[str, int]:
    """Bytes that decoding one token has to read, by the kernel that reads them."""
    products = gate_up = down = hyper = 0
    for layer in network.layers:
        dense = (*layer.entrance.matrices, *layer.queries.matrices)
        products += sum(m.bytes for m in (*dense, layer.wo_a, layer.wo_b, layer.router))
        bank, used = layer.experts, config.experts_per_token / config.num_experts
        gate_up += int((bank.w1.bytes + bank.w3.bytes) * used)
        down += int(bank.w2.bytes * used)
        shared = (layer.shared_w1, layer.shared_w3)
        gate_up += sum(matrix.bytes for matrix in shared if matrix is not None)
        down += 0 if layer.shared_w2 is None else layer.shared_w2.bytes
        hyper += layer.hc_attn.fn.nbytes + layer.hc_ffn.fn.nbytes
    rows = cache_read_bytes(StateLayout(config), depth)
    return {
        "_matvec_kernel": products + network.head.bytes,
        "_gate_up_kernel": gate_up,
        "_down_kernel": down,
        "_write_kernel": hyper,
        "rows": rows,
    }


def profile(run: Callable[[], object], steps: int) -> list[KernelTime]:
    """Kernels of some steps by the time they take on the device, per step."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        run()
    times = [
        KernelTime(
            name=event.key,
            launches=round(event.count / steps),
            seconds=event.self_device_time_total / 1e6 / steps,
            nbytes=None,
        )
        for event in profiler.key_averages()
        if event.self_device_time_total
    ]
    return sorted(times, key=lambda kernel: -kernel.seconds)


def _with_bytes(kernels: list[KernelTime], nbytes: dict[str, int]) -> list[KernelTime]:
    return [
        KernelTime(
            name=kernel.name,
            launches=kernel.launches,
            seconds=kernel.seconds,
            nbytes=nbytes.get(kernel.name),
        )
        for kernel in kernels
    ]
