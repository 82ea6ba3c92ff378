"""How fast an opened model runs, beside the rate at which this process reads memory.

A decoded token has to read its weights once, so the read rate divided by their bytes bounds decode;
the share of it that is reached says more than a speed alone. Tokens are drawn at random: how fast
they are computed does not depend on what they say.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch

from edgedsv4.config import SamplingOptions
from edgedsv4.errors import ConfigError
from edgedsv4.kernels.native import library as native
from edgedsv4.runtime.host import available_ram_bytes, physical_cores, processor_name

if TYPE_CHECKING:
    from edgedsv4.runtime.engine import Engine
    from edgedsv4.runtime.session import Session

STREAM_BYTES = 1 << 30
"""Bytes read to measure the memory, far more than caches hold; less where memory is short."""
_STREAM_READS = 5

Work = Literal["prefill", "decode"]
Progress = Callable[[str, int, int], None]
"""Called with (what is measured, runs done, runs in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What `measure_speed` runs."""

    prompt: int = 512
    """Tokens of a prefill; 0 leaves it out."""
    generate: int = 64
    """Tokens of a decode, sampled greedily; 0 leaves it out."""
    depths: tuple[int, ...] = (0,)
    """Tokens that are in the timeline before; a decode starts after at least one."""
    repeat: int = 5
    """Runs that count, after one that does not."""
    stream_bytes: int = STREAM_BYTES
    """Bytes read to measure the memory."""

    def __post_init__(self) -> None:
        least = {"prompt": 0, "generate": 0, "repeat": 1, "stream_bytes": 8}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be >= {low}, found {getattr(self, name)}")
        if not self.depths or min(self.depths) < 0:
            raise ConfigError(f"depths must be one or more numbers >= 0, found {self.depths}")
        if not self.prompt and not self.generate:
            raise ConfigError("prompt and generate are both 0, so there is nothing to measure")

    @property
    def context(self) -> int:
        """Tokens that a session must hold."""
        return max(self.depths) + max(self.prompt, self.generate + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedReading:
    """The runs of one kind of work at one depth."""

    work: Work
    depth: int
    tokens: int
    seconds: tuple[float, ...]
    bytes_per_token: int | None
    """What a decoded token has to read, on average; None for a prefill, which shares its reads."""

    @property
    def median(self) -> float:
        """Tokens per second of the median run."""
        return self.tokens / statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """Tokens per second of the fastest run."""
        return self.tokens / min(self.seconds)

    def share(self, stream_rate: float) -> float | None:
        """Bytes read per second by the median run, of the rate that memory allows."""
        if self.bytes_per_token is None:
            return None
        return self.median * self.bytes_per_token / stream_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedReport:
    """What was measured, and on what."""

    engine: dict[str, object]
    """`Engine.describe()`."""
    machine: dict[str, object]
    versions: dict[str, str]
    weights_per_token: dict[str, int]
    """Bytes of weights that a decoded token reads: dense ones and experts."""
    stream_rate: float
    """Bytes per second, the best of all reads before and after the runs."""
    stream_bytes: int
    readings: tuple[SpeedReading, ...]

    def to_json(self) -> dict[str, object]:
        """Everything as JSON types."""
        return {
            "engine": self.engine,
            "machine": self.machine,
            "versions": self.versions,
            "weights_per_token": self.weights_per_token,
            "stream": {"bytes_per_second": self.stream_rate, "bytes": self.stream_bytes},
            "results": [
                {
                    "work": reading.work,
                    "depth": reading.depth,
                    "tokens": reading.tokens,
                    "n": len(reading.seconds),
                    "median_tokens_per_second": reading.median,
                    "best_tokens_per_second": reading.best,
                    "seconds": list(reading.seconds),
                    "bytes_per_token": reading.bytes_per_token,
                    "share_of_stream": reading.share(self.stream_rate),
                }
                for reading in self.readings
            ],
        }


def measure_speed(
    engine: Engine, options: BenchOptions | None = None, *, on_progress: Progress | None = None
) -> SpeedReport:
    """Measure prefill and decode, and the read rate of memory before and after.

    Args:
        engine: the opened model; its threads, backend and chunk are what is measured.
        options: what to run.
        on_progress: told after every run.

    Raises:
        ConfigError: more tokens than the engine's context.
        CancelledError, NumericError, FormatError: as `Session.sync`.
    """
    options = options or BenchOptions()
    if options.context > engine.context:
        raise ConfigError(
            f"{options.context:,} tokens are needed for these depths, the context is"
            f" {engine.context:,}; open the model with a larger one"
        )
    threads = _threads(engine)
    stream_bytes = min(options.stream_bytes, max(8, available_ram_bytes() // 4)) // 8 * 8
    memory = np.ones(stream_bytes // 8, dtype=np.uint64)
    rates = [read_rate(memory, threads)]
    with engine.new_session() as session:
        runs = _Runs(engine, session, options, on_progress or (lambda _what, _done, _total: None))
        readings = [reading for depth in options.depths for reading in runs.at(depth)]
    rates.append(read_rate(memory, threads))
    weights = engine.bytes_per_token()
    return SpeedReport(
        engine=engine.describe(),
        machine=_machine(),
        versions=package_versions(),
        weights_per_token={name: weights[name] for name in ("dense_weights", "expert_weights")},
        stream_rate=max(rates),
        stream_bytes=stream_bytes,
        readings=tuple(readings),
    )


def read_rate(memory: npt.NDArray[np.uint64], threads: int, reads: int = _STREAM_READS) -> float:
    """Bytes per second at which this process reads memory, the best of some sums over `memory`.

    The C kernels' own threads do it where they are built, else torch's.
    """
    read = _native_reader(memory, threads) if native.HAVE_NATIVE else _torch_reader(memory, threads)
    read()
    best = min(_timed(read) for _ in range(reads))
    return memory.nbytes / best


def _native_reader(memory: npt.NDArray[np.uint64], threads: int) -> Callable[[], object]:
    lib, ffi = native.library()
    run = native.new_run(threads)
    total = ffi.new("uint64_t *")
    words = ffi.cast("uint64_t *", memory.ctypes.data)
    return lambda: run.check(lib.dk_stream_sum(run.cdata, total, words, memory.size))


def _torch_reader(memory: npt.NDArray[np.uint64], threads: int) -> Callable[[], object]:
    numbers = torch.from_numpy(memory.view(np.int64))

    def read() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            numbers.sum()
        finally:
            torch.set_num_threads(before)

    return read


class _Runs:
    """Runs prefill and decode in turns, so that both meet the same disturbances."""

    def __init__(
        self, engine: Engine, session: Session, options: BenchOptions, report: Progress
    ) -> None:
        self._engine = engine
        self._session = session
        self._options = options
        self._report = report
        draw = np.random.default_rng(1)
        self._ids: list[int] = draw.integers(
            engine.config.vocab_size, size=options.context
        ).tolist()

    def at(self, depth: int) -> list[SpeedReading]:
        """Measure with `depth` tokens in the timeline."""
        options = self._options
        work: dict[Work, list[float]] = {"prefill": [], "decode": []}
        for number in range(options.repeat + 1):
            if options.prompt:
                work["prefill"].append(self._prefill(depth))
            if options.generate:
                work["decode"].append(self._decode(max(1, depth)))
            self._report(f"depth {depth:,}", number + 1, options.repeat + 1)
        tokens: dict[Work, int] = {"prefill": options.prompt, "decode": options.generate}
        return [
            SpeedReading(
                work=name,
                depth=depth,
                tokens=tokens[name],
                seconds=tuple(seconds[1:]),
                bytes_per_token=self._bytes(depth) if name == "decode" else None,
            )
            for name, seconds in work.items()
            if seconds
        ]

    def _prefill(self, depth: int) -> float:
        prompt = self._ids[depth : depth + self._options.prompt]
        self._session.sync(self._ids[:depth])
        return _timed(lambda: self._session.evaluate(prompt))

    def _decode(self, depth: int) -> float:
        greedy = SamplingOptions(temperature=0, max_tokens=self._options.generate)
        self._session.sync(self._ids[:depth])
        self._session.logits()
        return _timed(lambda: list(self._session.generate(greedy)))

    def _bytes(self, depth: int) -> int:
        """Half way through the decode."""
        middle = max(1, depth) + self._options.generate // 2
        return sum(self._engine.bytes_per_token(middle).values())


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _threads(engine: Engine) -> int:
    threads = engine.describe()["threads"]
    return threads if isinstance(threads, int) else torch.get_num_threads()


def _machine() -> dict[str, object]:
    instructions = None
    if native.HAVE_NATIVE:
        lib, ffi = native.library()
        instructions = ffi.string(lib.dk_isa_name(lib.dk_isa())).decode()
    return {
        "processor": processor_name(),
        "cores": physical_cores(),
        "instructions": instructions,
        "system": platform.system(),
    }


def package_versions() -> dict[str, str]:
    """Numbers of what computes: this package, Python, torch."""
    try:
        own = version("edgedsv4")
    except PackageNotFoundError:
        own = "not installed"
    return {"edgedsv4": own, "python": platform.python_version(), "torch": torch.__version__}
