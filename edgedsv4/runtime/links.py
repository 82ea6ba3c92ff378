"""What the links of a machine carry, as data: the figures that placement and predictions rest on.

Memory, the CPU's expert kernels, drives and a card, each with all runs of its measurement; the
median counts. `measure_links` (link_bench.py) fills these records; here they are looked up, written
as JSON and read back. No torch, no measuring: a plan for another machine starts from its file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NoReturn

from edgedsv4.errors import FormatError
from edgedsv4.formats.whole_file import whole_file
from edgedsv4.runtime.host import (
    ROOT,
    display_adapters,
    physical_cores,
    processor_name,
    total_ram_bytes,
)
from edgedsv4.runtime.rate_curves import seconds_per_weight

FORMAT = "edgedsv4-links-2"
MAX_FILE_BYTES = 4 << 20
"""Of a file with figures; a real one has a few KiB."""
MOST_SHARING = 1024
"""Tokens that share an expert, as far as is looked: more than any chunk gives one."""
_MOST_ENTRIES = 4096
_MOST = 1 << 62
_TINIEST, _GREATEST = 1e-12, 1e30

Access = Literal["direct", "buffered"]
"""How a drive was read: past the page cache, or through it with its pages dropped before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DramRate:
    """Reads of main memory by some threads."""

    threads: int
    runs: tuple[float, ...]
    """Bytes per second of each run."""

    @property
    def median(self) -> float:
        """Bytes per second."""
        return statistics.median(self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRate:
    """Routed experts computed by the CPU or a card, with weights that no cache holds."""

    block_type: str
    threads: int
    """Of the CPU; 1 for a card."""
    tokens: int
    """Tokens that each expert computes at once."""
    bytes_per_weight: float
    runs: tuple[float, ...]
    """Stored weights per second of each run, each counted once whatever the tokens."""

    @property
    def median(self) -> float:
        """Stored weights per second."""
        return statistics.median(self.runs)

    @property
    def bytes_per_second(self) -> float:
        """Bytes of weights per second."""
        return self.median * self.bytes_per_weight

    @property
    def products_per_second(self) -> float:
        """Multiplications with an addition per second."""
        return self.median * self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRate:
    """One token's experts of one layer, computed by the CPU after a pause, as beside a card."""

    block_type: str
    threads: int
    experts: int
    """Computed in the call."""
    expert_weights: int
    """Elements of one of them."""
    runs: tuple[float, ...]
    """Seconds of each call."""

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveReading:
    """Reads of one size, some of them on their way at any time."""

    request_bytes: int
    depth: int
    runs: tuple[float, ...]
    """Bytes per second of each run."""

    @property
    def median(self) -> float:
        """Bytes per second."""
        return statistics.median(self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveRate:
    """One drive, known by where it is mounted."""

    mount: str
    access: Access
    readings: tuple[DriveReading, ...]

    @property
    def best(self) -> DriveReading:
        """The fastest way to read it; the smallest depth and size among equals."""
        order = sorted(self.readings, key=lambda found: (found.depth, found.request_bytes))
        return max(order, key=lambda found: found.median)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRate:
    """What a GPU does and what its bus carries; an empty tuple is what could not be measured."""

    name: str
    """As `EngineOptions.device` takes it."""
    description: str
    memory_bytes: int
    free_bytes: int
    """What an engine may take of it, a reserve left out, when it was measured."""
    to_card: tuple[float, ...]
    """Bytes per second from pinned memory, in pieces as large as an expert."""
    from_card: tuple[float, ...]
    """Bytes per second into pinned memory."""
    copy: tuple[float, ...]
    """Bytes per second, reads and writes together, within the card's memory."""
    read: tuple[float, ...]
    """Bytes per second read of the card's memory."""
    products: tuple[float, ...]
    """Multiplications with an addition per second, bfloat16 matrices."""
    exchange_seconds: tuple[float, ...]
    """A token's row to the host, a call there, and a row of sums back, as a step makes them."""
    launch_seconds: tuple[float, ...]
    """Of one launch of a recorded step, beyond the reading of its bytes."""
    overlapped_launch_seconds: tuple[float, ...]
    """The same where a kernel begins while the one before ends; empty where none can."""
    experts: tuple[ExpertRate, ...]
    """Routed experts computed by the card, by block type and tokens of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRate:
    """Experts on all cores while the card copies from memory: both at once."""

    block_type: str
    bytes_per_weight: float
    expert_runs: tuple[float, ...]
    """Stored weights per second."""
    to_card_runs: tuple[float, ...]
    """Bytes per second."""

    @property
    def total(self) -> float:
        """Bytes per second that memory gives both together."""
        experts = statistics.median(self.expert_runs) * self.bytes_per_weight
        return experts + statistics.median(self.to_card_runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What figures belong to; where one differs they are another machine's, or of other kernels."""

    processor: str
    cores: int
    ram_bytes: int
    adapters: tuple[str, ...]
    """Vendor and device numbers of display adapters and accelerators."""
    version: str
    """Of edgedsv4."""

    @classmethod
    def of(cls, root: Path = ROOT) -> MachineFacts:
        """Those of this machine and installation."""
        return cls(
            processor=processor_name(root),
            cores=physical_cores(root),
            ram_bytes=total_ram_bytes(root),
            adapters=display_adapters(root),
            version=_own_version(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Everything that was measured of one machine."""

    machine: MachineFacts
    instructions: str | None
    """Those the CPU's kernels use; None without them."""
    dram: tuple[DramRate, ...]
    experts: tuple[ExpertRate, ...]
    calls: tuple[CallRate, ...]
    """Of a machine with a card: what the CPU computes for it in one call."""
    drives: tuple[DriveRate, ...]
    card: CardRate | None
    overlap: OverlapRate | None
    notes: tuple[str, ...]
    """What was left out, and why."""

    @property
    def dram_rate(self) -> float:
        """Bytes per second that the CPU reads at best; 0 when it was not measured."""
        return max((found.median for found in self.dram), default=0.0)

    def drive_of(self, path: Path) -> DriveRate | None:
        """The drive that holds a file or directory, if it was measured."""
        mount = mount_of(path)
        return next((drive for drive in self.drives if drive.mount == mount), None)

    def expert_rates(self, block_type: str) -> tuple[ExpertRate, ...]:
        """Rates of a block type with the most threads measured, by tokens."""
        rates = [found for found in self.experts if found.block_type == block_type]
        most = max((found.threads for found in rates), default=0)
        chosen = [found for found in rates if found.threads == most]
        return tuple(sorted(chosen, key=lambda found: found.tokens))

    def card_rates(self, block_type: str) -> tuple[ExpertRate, ...]:
        """Rates of the card with a block type, by tokens; empty where none were measured."""
        rates = () if self.card is None else self.card.experts
        chosen = [found for found in rates if found.block_type == block_type]
        return tuple(sorted(chosen, key=lambda found: found.tokens))

    def call_rates(self, block_type: str) -> tuple[CallRate, ...]:
        """Calls of the CPU with a block type, by experts."""
        chosen = [found for found in self.calls if found.block_type == block_type]
        return tuple(sorted(chosen, key=lambda found: found.experts))

    def switch_tokens(self, block_type: str) -> int | None:
        """Tokens from which copying an expert to the card takes less time than the CPU's work.

        Returns:
            Tokens that share the expert; None without a card, without rates of the type, or where
            the CPU wins up to `MOST_SHARING` tokens.
        """
        rates = self.expert_rates(block_type)
        if self.card is None or not self.card.to_card or not rates:
            return None
        copied = rates[0].bytes_per_weight / statistics.median(self.card.to_card)
        for tokens in range(1, MOST_SHARING + 1):
            seconds = seconds_per_weight(rates, tokens)
            if seconds is not None and seconds > copied:
                return tokens
        return None

    def with_rest_of(self, earlier: Links) -> Links:
        """These figures, and what only `earlier` has: drives, block types, a card."""
        mounts = {drive.mount for drive in self.drives}
        types = {rate.block_type for rate in self.experts}
        drives = tuple(drive for drive in earlier.drives if drive.mount not in mounts)
        experts = tuple(rate for rate in earlier.experts if rate.block_type not in types)
        called = {rate.block_type for rate in self.calls}
        calls = tuple(rate for rate in earlier.calls if rate.block_type not in called)
        has_card = self.card is not None
        return dataclasses.replace(
            self,
            drives=(*self.drives, *drives),
            experts=(*self.experts, *experts),
            calls=(*self.calls, *calls),
            card=_with_types_of(self.card, earlier.card),
            overlap=self.overlap if has_card else earlier.overlap,
        )

    def to_json(self) -> dict[str, object]:
        """Everything as JSON types; `from_json` reads it back."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, value: object, path: Path | None = None) -> Links:
        """Read what `to_json` gave.

        Args:
            value: parsed JSON.
            path: where it came from, for the message.

        Raises:
            FormatError: naming the first entry that is not as it must be.
        """
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            found = value.get("format") if isinstance(value, dict) else type(value).__name__
            raise FormatError(
                f"expected figures of `edgedsv4 bench links --json` (format {FORMAT}),"
                f" found {str(found)[:40]!r}; measure again",
                path=path,
            )
        rest = {name: entry for name, entry in value.items() if name != "format"}
        links = _Reader(path).record(cls, rest, "links")
        assert isinstance(links, Links)
        return links

    def write(self, path: Path) -> None:
        """Write a file for `read`, whole or not at all.

        Raises:
            OSError, ConfigError: as `whole_file`.
        """
        text = json.dumps(self.to_json(), indent=1, allow_nan=False)
        with whole_file(path) as file:
            file.write(f"{text}\n".encode())

    @classmethod
    def read(cls, path: Path) -> Links:
        """Read a file that holds such JSON.

        Raises:
            FormatError: it cannot be read, or does not hold that.
        """
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            fault: Literal["missing", "format"] = (
                "missing" if isinstance(error, FileNotFoundError) else "format"
            )
            why = error.strerror or str(error)
            raise FormatError(f"cannot be read: {why}", path=path, fault=fault) from error
        if len(data) > MAX_FILE_BYTES:
            raise FormatError(f"expected at most {MAX_FILE_BYTES:,} bytes, found more", path=path)
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"expected JSON: {str(error)[:100]}", path=path) from error
        return cls.from_json(value, path)


def _with_types_of(card: CardRate | None, earlier: CardRate | None) -> CardRate | None:
    """A card, with the block types that only the earlier figures of the same one have."""
    if card is None or earlier is None or card.name != earlier.name:
        return card or earlier
    types = {rate.block_type for rate in card.experts}
    rest = tuple(rate for rate in earlier.experts if rate.block_type not in types)
    return dataclasses.replace(card, experts=(*card.experts, *rest))


def mount_of(path: Path) -> str:
    """Where the file system that holds a path is mounted; of its nearest parent that exists."""
    place = os.path.realpath(path)
    while not os.path.ismount(place):
        parent = os.path.dirname(place)  # noqa: PTH120  # of a text, as realpath gives it
        if parent == place:
            break
        place = parent
    return place


def _own_version() -> str:
    try:
        return version("edgedsv4")
    except PackageNotFoundError:
        return "not installed"


# ---- reading records back ----


class _Reader:
    """Turns parsed JSON into the records above; every value is checked for kind and range."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._kinds: Mapping[str, Callable[[object, str], object]] = {
            "int": self._whole,
            "float": self._positive,
            "str": self._text,
            "str | None": lambda value, at: None if value is None else self._text(value, at),
            "Access": self._access,
            "tuple[float, ...]": self._list(self._positive),
            "tuple[str, ...]": self._list(self._text),
            "MachineFacts": self._record(MachineFacts),
            "CardRate | None": self._optional(CardRate),
            "OverlapRate | None": self._optional(OverlapRate),
            "tuple[DramRate, ...]": self._list(self._record(DramRate)),
            "tuple[ExpertRate, ...]": self._list(self._record(ExpertRate)),
            "tuple[CallRate, ...]": self._list(self._record(CallRate)),
            "tuple[DriveRate, ...]": self._list(self._record(DriveRate)),
            "tuple[DriveReading, ...]": self._list(self._record(DriveReading)),
        }

    def record(self, kind: type, value: object, at: str) -> object:
        """A record of one class, with exactly its fields."""
        fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}
        if not isinstance(value, dict) or set(value) != set(fields):
            found = sorted(map(str, value)) if isinstance(value, dict) else type(value).__name__
            self._fail(at, f"an object with {', '.join(fields)}", str(found)[:200])
        read = {
            name: self._kinds[wanted](value[name], f"{at}.{name}")
            for name, wanted in fields.items()
        }
        if kind is not CardRate:  # of a card something may be missing
            for name in ("runs", "readings", "expert_runs", "to_card_runs"):
                if read.get(name) == ():
                    self._fail(f"{at}.{name}", "at least one entry", "none")
        return kind(**read)

    def _record(self, kind: type) -> Callable[[object, str], object]:
        return lambda value, at: self.record(kind, value, at)

    def _optional(self, kind: type) -> Callable[[object, str], object]:
        return lambda value, at: None if value is None else self.record(kind, value, at)

    def _list(self, one: Callable[[object, str], object]) -> Callable[[object, str], object]:
        def read(value: object, at: str) -> object:
            if not isinstance(value, (list, tuple)) or len(value) > _MOST_ENTRIES:
                self._fail(at, f"a list of at most {_MOST_ENTRIES} entries", type(value).__name__)
            return tuple(one(entry, f"{at}[{place}]") for place, entry in enumerate(value))

        return read

    def _whole(self, value: object, at: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
            self._fail(at, f"a whole number 1..{_MOST}", repr(value)[:40])
        return value

    def _positive(self, value: object, at: str) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self._fail(at, "a number", repr(value)[:40])
        if not _TINIEST <= value <= _GREATEST:  # NaN is not, either
            self._fail(at, f"a number {_TINIEST}..{_GREATEST}", repr(value)[:40])
        return float(value)

    def _text(self, value: object, at: str) -> str:
        if not isinstance(value, str) or len(value) > 1 << 12:
            self._fail(at, "a text", type(value).__name__)
        return value

    def _access(self, value: object, at: str) -> str:
        if value not in ("direct", "buffered"):
            self._fail(at, "'direct' or 'buffered'", repr(value)[:40])
        return str(value)

    def _fail(self, at: str, expected: str, found: str) -> NoReturn:
        raise FormatError(
            f"{at}: expected {expected}, found {found}; measure again", path=self._path
        )
