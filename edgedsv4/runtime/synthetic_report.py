"""What a measurement of a random network found: speeds, kernels, and whether they can be true."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from edgedsv4.runtime.synthetic_prediction import Expectation
    from edgedsv4.runtime.synthetic_traffic import Traffic

Work = Literal["prefill", "decode"]

_TORCH_KERNEL = re.compile(r"at::native::(?:\(anonymous namespace\)::)?(\w+)")
_OPERATION = re.compile(
    r"(\w*Functor\w*|\w+_kernel_cuda|\w+_kernel_impl|direct_copy_k\w*|\w+_kernel)"
)
_NAME_COLUMNS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """All launches of one kernel within one step: a decoded token, or a whole prefill."""

    name: str
    launches: int
    seconds: float
    """On the device."""
    traffic: Traffic | None = None
    """What the launches move, where that is known."""

    @property
    def read_rate(self) -> float | None:
        """Bytes per second."""
        return None if self.traffic is None else self.traffic.total / self.seconds


@dataclass(frozen=True, slots=True)
class HostShare:
    """What the CPU computed for a decoded token on average."""

    experts: float
    seconds: float
    """In its kernels."""
    nbytes: float
    """Of weights that it read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticReading:
    """The runs of one kind of work."""

    work: Work
    depth: int
    """Tokens in the timeline before."""
    tokens: int
    seconds: tuple[float, ...]
    """Of each token of a decode, of each run of a prefill."""
    bytes_per_token: int | None = None
    """Weights and rows that a decoded token has to read; None for a prefill, which shares them."""
    kernels: tuple[KernelTime, ...] = ()
    """Of one step, the longest first; empty when they were not asked for."""
    busy_seconds: float = 0.0
    """Of one step, in which at least one kernel was on the device; 0 without `kernels`."""
    unseen: Mapping[str, Traffic] = field(default_factory=dict)
    """What kernels move that should have run, and are not among `kernels`."""
    host: HostShare | None = None
    """Where the CPU computes experts, too."""

    @property
    def label(self) -> str:
        """What was measured, in words."""
        if self.work == "decode":
            return f"decode at {self.depth:,}"
        return f"prefill of {self.tokens:,}"

    @property
    def rate(self) -> float:
        """Tokens per second: of all tokens of a decode, of the median prefill."""
        if self.work == "decode":
            return len(self.seconds) / sum(self.seconds)
        return self.tokens / self.median_seconds

    @property
    def median_seconds(self) -> float:
        """Of a decoded token, or of a prefill."""
        return statistics.median(self.seconds)

    @property
    def p99_seconds(self) -> float:
        """Time that 99 of 100 do not exceed."""
        return sorted(self.seconds)[math.ceil(0.99 * len(self.seconds)) - 1]

    @property
    def kernel_seconds(self) -> float:
        """Of all kernels of one step, each for itself: some overlap."""
        return sum(kernel.seconds for kernel in self.kernels)

    def share(self, read_rate: float) -> float | None:
        """Bytes read per second, of the rate that memory allows."""
        if self.bytes_per_token is None:
            return None
        return self.rate * self.bytes_per_token / read_rate

    def to_json(self, read_rate: float) -> dict[str, object]:
        """The reading as JSON types."""
        found: dict[str, object] = {
            "work": self.work,
            "depth": self.depth,
            "tokens": self.tokens,
            "n": len(self.seconds),
            "tokens_per_second": self.rate,
            "median_seconds": self.median_seconds,
            "p99_seconds": self.p99_seconds,
            "seconds": list(self.seconds),
            "bytes_per_token": self.bytes_per_token,
            "share_of_reads": self.share(read_rate),
        }
        if self.host is not None:
            found["host_experts_per_token"] = self.host.experts
            found["host_seconds_per_token"] = self.host.seconds
            found["host_bytes_per_token"] = self.host.nbytes
        if self.kernels:
            found["busy_seconds"] = self.busy_seconds
            found["kernels"] = [_kernel_json(kernel) for kernel in self.kernels]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticReport:
    """What was measured, and on what."""

    model: dict[str, object]
    """Name, layers, block types."""
    device: dict[str, object]
    versions: dict[str, str]
    weight_bytes: int
    operations_per_token: int
    """Multiplications and additions of a prefilled token with its weights."""
    build_seconds: float
    """Making the weights."""
    read_rate: float
    """Bytes per second, the best of some reads of `read_bytes`."""
    read_bytes: int
    first_token_seconds: float | None
    """With compiling, of the first timeline; None when nothing was decoded."""
    capture_seconds: float | None
    """First token of the next timeline: nothing is compiled, the step is captured anew."""
    readings: tuple[SyntheticReading, ...]
    host: dict[str, object] = field(default_factory=dict)
    """Threads, memory rate and placement, where the CPU computes experts, too."""
    expectation: Expectation | None = None
    """What was expected before the measurement; None where nobody asked."""

    def host_share(self, reading: SyntheticReading) -> float | None:
        """Bytes of experts that the CPU read per second, of the rate that its memory allows."""
        rate = self.host.get("read_rate")
        if reading.host is None or not isinstance(rate, float):
            return None
        return reading.rate * reading.host.nbytes / rate

    def problems(self) -> tuple[str, ...]:
        """What shows that the measurement is wrong, a sentence each."""
        return tuple(
            f"{reading.label} would read {share * self.read_rate / 1e9:,.0f} GB/s, more than the"
            f" {self.read_rate / 1e9:,.0f} GB/s that memory gave: the measurement is wrong"
            for reading in self.readings
            if (share := reading.share(self.read_rate)) is not None and share > 1
        )

    def to_json(self) -> dict[str, object]:
        """Everything as JSON types."""
        return {
            "model": self.model,
            "device": self.device,
            "versions": self.versions,
            "weight_bytes": self.weight_bytes,
            "operations_per_token": self.operations_per_token,
            "build_seconds": self.build_seconds,
            "stream": {"bytes_per_second": self.read_rate, "bytes": self.read_bytes},
            "first_token_seconds": self.first_token_seconds,
            "capture_seconds": self.capture_seconds,
            "host": self.host,
            "expected": None if self.expectation is None else self.expectation.to_json(),
            "results": [self._reading_json(reading) for reading in self.readings],
            "problems": list(self.problems()),
        }

    def _reading_json(self, reading: SyntheticReading) -> dict[str, object]:
        expected = None if self.expectation is None else self.expectation.deviation(reading)
        return {
            **reading.to_json(self.read_rate),
            "share_of_host_reads": self.host_share(reading),
            "expected_tokens_per_second": None if expected is None else expected.predicted,
            "found_of_expected": None if expected is None else expected.ratio,
        }


def _kernel_json(kernel: KernelTime) -> dict[str, object]:
    found: dict[str, object] = {
        "name": kernel.name,
        "launches": kernel.launches,
        "seconds": kernel.seconds,
    }
    if kernel.traffic is not None:
        found["weight_bytes"] = kernel.traffic.weights
        found["row_bytes"] = kernel.traffic.rows
        found["activation_bytes"] = kernel.traffic.activations
    return found


def short_name(name: str) -> str:
    """A kernel's name without the template arguments and namespaces of C++."""
    kernel = _TORCH_KERNEL.search(name)
    if kernel is None:
        plain = name.removeprefix("void ")
        plain = plain if plain.startswith(("Memcpy", "Memset")) else re.split(r"[<(]", plain)[0]
        return plain.split("::")[-1].strip()[:_NAME_COLUMNS]
    rest = name[kernel.end() :]
    operation = next(
        (found for found in _OPERATION.findall(rest) if not found.startswith("gpu_kernel")), ""
    )
    words = ("torch", kernel[1].removesuffix("_kernel"), operation.removesuffix("_kernel_cuda"))
    return " ".join(words).strip()[:_NAME_COLUMNS]


def merged(kernels: Iterable[KernelTime]) -> tuple[KernelTime, ...]:
    """Kernels under their short names, those of one name together, the longest first."""
    found: dict[str, KernelTime] = {}
    for kernel in kernels:
        name = short_name(kernel.name)
        before = found.get(name)
        found[name] = replace(
            kernel,
            name=name,
            launches=kernel.launches + (before.launches if before else 0),
            seconds=kernel.seconds + (before.seconds if before else 0.0),
        )
    return tuple(sorted(found.values(), key=lambda kernel: -kernel.seconds))


def with_traffic(
    kernels: tuple[KernelTime, ...], traffic: Mapping[str, Traffic]
) -> tuple[tuple[KernelTime, ...], dict[str, Traffic]]:
    """Kernels with what they move, and what is left over because no such kernel ran."""
    names = {kernel.name for kernel in kernels}
    known = tuple(replace(kernel, traffic=traffic.get(kernel.name)) for kernel in kernels)
    return known, {name: moved for name, moved in traffic.items() if name not in names}
