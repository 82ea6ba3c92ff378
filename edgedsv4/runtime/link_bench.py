"""`measure_links`: every link of this machine, one after the other, each with several runs.

What cannot be measured is left out with a note, never replaced by a guess: no card, no C kernels,
no drive named. What was asked for and fails is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from edgedsv4.errors import ConfigError
from edgedsv4.kernels.native import library as native
from edgedsv4.model.native_network import instruction_set
from edgedsv4.runtime.device import resolve_device
from edgedsv4.runtime.gpu_devices import device_memory_errors, gpu_of
from edgedsv4.runtime.host import available_ram_bytes, physical_cores
from edgedsv4.runtime.link_card import Card, TorchCard, measure_card, measure_overlap
from edgedsv4.runtime.link_drive import DriveReader, drive_file, measure_drive
from edgedsv4.runtime.link_memory import AT_ONCE, ExpertBench, check_block_type, dram_rates
from edgedsv4.runtime.link_step import call_seconds
from edgedsv4.runtime.links import (
    CallRate,
    CardRate,
    DriveRate,
    ExpertRate,
    Links,
    MachineFacts,
    OverlapRate,
)

Progress = Callable[[str, int, int], None]
"""Called with (what is measured, steps done, steps in all)."""

TOKENS = (1, 2, 4, 8, 16, 64)
"""Tokens that an expert computes at once."""
CALLED = tuple(range(1, AT_ONCE + 1))
"""Experts of a call for a card."""
CALLS = 20
"""Calls of each such run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """What `measure_links` runs."""

    path: Path | None = None
    """A file or directory on the drive to measure; None leaves drives out. A file is only read; in
    a directory one is made and removed."""
    types: tuple[str, ...] = ("MXFP4", "Q4_K", "Q2_K", "IQ2_XXS", "FP4_E2M1", "Q8_0", "BF16")
    """Block types of experts, and of dense weights that the CPU multiplies with; none leaves both
    out."""
    threads: int | None = None
    """Most threads, 1..1024; None takes the physical cores."""
    is_thorough: bool = True
    """Measure what no prediction needs, too: fewer threads, and experts beside copies."""
    device: str = "auto"
    """The card to measure, as `EngineOptions.device`; `cpu` leaves cards out."""
    repeat: int = 3
    """Runs of everything, 1..100; the median counts."""
    run_seconds: float = 0.1
    """Seconds of a run, 0.001..60."""
    memory_bytes: int = 6 << 30
    """Memory read in a run and filled with experts, 1 MiB..1 TiB; never more than a quarter of what
    is free."""
    temporary_bytes: int = 1 << 30
    """Size of the file made in a directory, 64 MiB..1 TiB."""

    def __post_init__(self) -> None:
        ranges: dict[str, tuple[float, float]] = {
            "repeat": (1, 100),
            "run_seconds": (0.001, 60),
            "memory_bytes": (1 << 20, 1 << 40),
            "temporary_bytes": (64 << 20, 1 << 40),
        }
        if self.threads is not None:
            ranges["threads"] = (1, 1024)
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} must be {low:,}..{high:,}, found {value!r}", name=name)
        if len(set(self.types)) != len(self.types):
            raise ConfigError(f"types must differ, found {', '.join(self.types)}", name="types")


def measure_links(
    options: LinkOptions | None = None, *, on_progress: Progress | None = None
) -> Links:
    """Measure memory, experts on the CPU, a drive, and a card with its bus.

    Args:
        options: what to run.
        on_progress: told before every step.

    Raises:
        ConfigError: a block type or path that cannot be measured.
        BackendUnavailableError: a card was named that is not there.
        StorageError: the drive cannot be read, or what was read did not come from it.
        CapacityError: no room for the file, or on the card.
        DeviceLostError: the card failed.
    """
    options = options or LinkOptions()
    if native.HAVE_NATIVE:
        for name in options.types:
            check_block_type(name)
    device = resolve_device(options.device)
    return _Measurement(options, on_progress or (lambda _what, _done, _total: None)).run(device)


class _Measurement:
    """One measurement, with the notes that it gathers."""

    def __init__(self, options: LinkOptions, report: Progress) -> None:
        self._options = options
        self._report = report
        self._notes: list[str] = []
        self._cores = options.threads or physical_cores()
        free = max(1 << 20, available_ram_bytes() // 4)
        self._memory_bytes = min(options.memory_bytes, free) // 8 * 8

    def run(self, device: torch.device) -> Links:
        """Everything; the drive first, since it is most likely to be refused."""
        options = self._options
        drives: tuple[DriveRate, ...] = ()
        if options.path is None:
            self._notes.append("no drive was named (path)")
        else:
            self._report("a file to read", 0, 1)
            with drive_file(options.path, options.temporary_bytes) as file:
                reader = DriveReader(file)
                drives = (
                    measure_drive(reader, file, options.repeat, options.run_seconds, self._report),
                )
        counts = thread_counts(self._cores) if options.is_thorough else (self._cores,)
        self._report("memory", 0, 1)
        dram = dram_rates(counts, self._memory_bytes, options.repeat)
        experts, calls = self._experts(counts, device)
        card, overlap = self._card(device)
        return Links(
            machine=MachineFacts.of(),
            instructions=instruction_set() if native.HAVE_NATIVE else None,
            dram=dram,
            experts=experts,
            calls=calls,
            drives=drives,
            card=card,
            overlap=overlap,
            notes=tuple(self._notes),
        )

    def _experts(
        self, counts: tuple[int, ...], device: torch.device
    ) -> tuple[tuple[ExpertRate, ...], tuple[CallRate, ...]]:
        if not native.HAVE_NATIVE:
            self._notes.append(f"experts on the CPU were left out: {native.WHY_NOT}")
            return (), ()
        rates: list[ExpertRate] = []
        calls: list[CallRate] = []
        for place, name in enumerate(self._options.types):
            self._report(f"{name} experts on the CPU", place, len(self._options.types))
            bench = ExpertBench(name, self._memory_bytes)
            shapes = [(count, 1) for count in counts]
            shapes += [(self._cores, tokens) for tokens in TOKENS if tokens > 1]
            rates += [
                ExpertRate(
                    block_type=name,
                    threads=threads,
                    tokens=tokens,
                    bytes_per_weight=bench.bytes_per_weight,
                    runs=self._runs(bench, threads, tokens),
                )
                for threads, tokens in shapes
            ]
            if device.type != "cpu":
                calls += [self._call(bench, name, experts, device) for experts in CALLED]
        return tuple(rates), tuple(calls)

    def _call(self, bench: ExpertBench, name: str, experts: int, device: torch.device) -> CallRate:
        return CallRate(
            block_type=name,
            threads=self._cores,
            experts=experts,
            expert_weights=bench.shape.weights,
            runs=call_seconds(bench, device, self._cores, experts, CALLS),
        )

    def _runs(self, bench: ExpertBench, threads: int, tokens: int) -> tuple[float, ...]:
        seconds = self._options.run_seconds
        return tuple(bench.rate(threads, tokens, seconds) for _ in range(self._options.repeat))

    def _card(self, device: torch.device) -> tuple[CardRate | None, OverlapRate | None]:
        if device.type == "cpu":
            self._notes.append("no card was measured: none was asked for, or there is none")
            return None, None
        with device_memory_errors("measuring the card", device):
            card = TorchCard(gpu_of(device))
            options = self._options
            rate = measure_card(
                card, options.repeat, options.run_seconds, self._report, options.types
            )
            if not rate.read:
                self._notes.append(
                    "reads, launches and experts of the card were left out: they need Triton"
                )
            return rate, self._overlap(card)

    def _overlap(self, card: Card) -> OverlapRate | None:
        options = self._options
        if not (native.HAVE_NATIVE and options.types and options.is_thorough):
            return None
        self._report("experts and copies at once", 0, 1)
        name = self._options.types[0]
        return measure_overlap(
            card,
            ExpertBench(name, self._memory_bytes),
            name,
            threads=self._cores,
            repeat=self._options.repeat,
            seconds=self._options.run_seconds,
        )


def thread_counts(most: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, and the largest number."""
    counts = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*counts, most)
