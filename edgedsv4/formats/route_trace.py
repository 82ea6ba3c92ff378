"""Route traces: which experts each token was sent to, layer by layer, for replaying cache policies.

All numbers are little-endian. One file is a header of 96 bytes, the expert ids, and the runs:

| offset | type | field |
|---:|---|---|
| 0 | 8 B | magic `DSV4RTRC` |
| 8 | u32 | version, 1, or 2 with guesses |
| 12 | u32 | header bytes, 96 |
| 16 | u32 | L, layers with routed experts |
| 20 | u32 | E, experts per layer |
| 24 | u32 | k, experts per token and layer |
| 28 | u32 | G, guesses per token and layer; 0 in version 1, 1..64 and at most E in version 2 |
| 32 | u64 | T, tokens |
| 40 | u64 | R, runs, at most 524,288 |
| 48 | 32 B | SHA-256 that identifies the model; zeros when it is not known |
| 80 | u32 | CRC-32 of everything behind the header |
| 84 | u32 | CRC-32 of the header without this field (bytes 0..83) |
| 88 | 8 B | reserved, 0 |

Expert ids are u16 [T, L, k + G]: for each token and layer first those it was sent to, then those
that were guessed before, the likeliest first (`ForwardHooks.on_guesses`); where nothing was guessed
all G are 65,535. A run is a span of tokens evaluated in one way: u64 first token, u32 1
for prefill or 2 for decode, u32 1 when a new text begins there, else 0. The first run begins a text
at token 0. A file is exactly as long as its header says.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from edgedsv4.config import MAX_EXPERTS, MAX_LAYERS
from edgedsv4.errors import ConfigError, FormatError
from edgedsv4.formats.faults import FaultList
from edgedsv4.formats.whole_file import whole_file

MAGIC = b"DSV4RTRC"
VERSION = 1
VERSION_OF_GUESSES = 2
MOST_GUESSES = 64
"""Per token and layer."""
NO_GUESS = 0xFFFF
MOST_RUNS = 1 << 19
"""A run takes 16 bytes of a file and a hundred in memory, which must not be more than 64 MiB."""
_BLOCK = 1 << 20
"""Guesses that are looked at together: each takes three bytes meanwhile."""
_FIELDS = struct.Struct("<8sIIIIIIQQ32sI")
_CHECK = struct.Struct("<I8s")
_HEADER_BYTES = _FIELDS.size + _CHECK.size
_RUN = np.dtype([("first", "<u8"), ("kind", "<u4"), ("begins", "<u4")])
_KINDS: dict[str, int] = {"prefill": 1, "decode": 2}
_IDENTITY_BYTES = 32

ExpertIds = npt.NDArray[np.uint16]
RunKind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Run:
    """A span of tokens that were evaluated in one way; it ends where the next one begins."""

    first: int
    kind: RunKind
    begins_text: bool
    """Whether the tokens before belong to another text."""


@dataclass(frozen=True, slots=True)
class RouteShape:
    """What the ids of a trace mean."""

    layers: int
    experts: int
    """Per layer."""
    experts_per_token: int

    def problem(self) -> str | None:
        """What is wrong with these numbers, None when nothing is."""
        limits = (
            ("layers", self.layers, MAX_LAYERS),
            ("experts", self.experts, MAX_EXPERTS),
            ("experts per token", self.experts_per_token, self.experts),
        )
        for name, value, limit in limits:
            if not 1 <= value <= limit:
                return f"{name} must be 1..{limit}, found {value}"
        return None


@dataclass(frozen=True, slots=True)
class RouteTrace:
    """A whole trace in memory."""

    shape: RouteShape
    ids: ExpertIds
    """[T, L, k]"""
    runs: tuple[Run, ...]
    identity_sha256: str = ""
    """Of the model, hexadecimal; empty when it is not known."""
    guesses: ExpertIds | None = None
    """[T, L, G], the likeliest first, `NO_GUESS` where nothing was guessed; None without any."""

    def spans(self) -> Iterator[tuple[Run, int]]:
        """Every run and the token behind its last one."""
        ends = [*(run.first for run in self.runs[1:]), len(self.ids)]
        yield from zip(self.runs, ends, strict=True)


class RouteWriter:
    """Appends chunks of tokens to a trace."""

    def __init__(self, file: BinaryIO, shape: RouteShape, identity: bytes) -> None:
        self.tokens = 0
        """Written so far."""
        self._file = file
        self._shape = shape
        self._identity = identity
        self._runs: list[Run] = []
        self._guesses = 0
        self._checksum = 0
        file.write(bytes(_HEADER_BYTES))

    def append(
        self,
        ids: npt.ArrayLike,
        kind: RunKind,
        *,
        guesses: npt.ArrayLike | None = None,
        begins_text: bool = False,
    ) -> None:
        """Write the next tokens.

        Args:
            ids: expert ids [n, L, k].
            kind: how the tokens were evaluated.
            guesses: of each layer [n, L, G], the likeliest first, all -1 where nothing was guessed;
                the same G for all tokens of a trace, or none for all.
            begins_text: they do not continue the tokens before.

        Raises:
            ValueError: another shape, or an id that is no expert.
        """
        values = np.asarray(ids)
        shape = self._shape
        if values.ndim != 3 or values.shape[1:] != (shape.layers, shape.experts_per_token):
            raise ValueError(
                f"expert ids are {list(values.shape)},"
                f" expected [n, {shape.layers}, {shape.experts_per_token}]"
            )
        if not len(values):
            return
        if int(values.min()) < 0 or int(values.max()) >= shape.experts:
            raise ValueError(
                f"expert ids must be 0..{shape.experts - 1},"
                f" found {int(values.min())}..{int(values.max())}"
            )
        rows = values if guesses is None else self._with_guesses(values, np.asarray(guesses))
        found = rows.shape[2] - shape.experts_per_token
        if self.tokens and found != self._guesses:
            raise ValueError(f"{found} guesses, {self._guesses} with the tokens before")
        self._guesses = found
        begins = begins_text or not self._runs
        if begins or self._runs[-1].kind != kind:
            self._runs.append(Run(self.tokens, kind, begins))
        self._put(np.ascontiguousarray(rows, dtype="<u2").tobytes())
        self.tokens += len(values)

    def finish(self) -> None:
        """Write the runs and the header; raises ConfigError for no token, or too many runs."""
        if not self.tokens:
            raise ConfigError("the trace has no tokens; evaluate some while it is recorded")
        if len(self._runs) > MOST_RUNS:
            raise ConfigError(f"the trace has {len(self._runs):,} of {MOST_RUNS:,} runs")
        rows = [(run.first, _KINDS[run.kind], run.begins_text) for run in self._runs]
        self._put(np.array(rows, dtype=_RUN).tobytes())
        shape = self._shape
        fields = _FIELDS.pack(
            MAGIC,
            VERSION_OF_GUESSES if self._guesses else VERSION,
            _HEADER_BYTES,
            shape.layers,
            shape.experts,
            shape.experts_per_token,
            self._guesses,
            self.tokens,
            len(self._runs),
            self._identity,
            self._checksum,
        )
        self._file.seek(0)
        self._file.write(fields + _CHECK.pack(zlib.crc32(fields), bytes(8)))

    def _with_guesses(
        self, ids: npt.NDArray[np.int64], guesses: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Rows of a file of version 2."""
        most = min(MOST_GUESSES, self._shape.experts)
        if guesses.ndim != 3 or guesses.shape[:2] != ids.shape[:2]:
            raise ValueError(f"guesses are {list(guesses.shape)} for ids {list(ids.shape)}")
        if not 1 <= guesses.shape[2] <= most:
            raise ValueError(f"guesses must be 1..{most}, found {guesses.shape[2]}")
        is_none = guesses == -1
        if not _are_guesses(np.where(is_none, NO_GUESS, guesses), self._shape.experts):
            raise ValueError(f"guesses must be 0..{self._shape.experts - 1}, or -1 for all of one")
        return np.concatenate([ids, np.where(is_none, NO_GUESS, guesses)], axis=2)

    def _put(self, data: bytes) -> None:
        self._checksum = zlib.crc32(data, self._checksum)
        self._file.write(data)


@contextmanager
def write_route_trace(
    path: Path, shape: RouteShape, *, identity_sha256: str = ""
) -> Iterator[RouteWriter]:
    """Open a trace for writing; it takes its name only when it is complete.

    Raises:
        ConfigError: a shape or identity that the format cannot hold, no token was written, or
            `path` is no file.
        OSError: it cannot be written; nothing is left behind.
    """
    problem = shape.problem()
    if problem is not None:
        raise ConfigError(f"a route trace cannot hold this model: {problem}")
    identity = bytes.fromhex(identity_sha256) if identity_sha256 else bytes(_IDENTITY_BYTES)
    if len(identity) != _IDENTITY_BYTES:
        raise ConfigError(f"expected a SHA-256 of 64 digits, found {len(identity_sha256)}")
    with whole_file(path) as file:
        writer = RouteWriter(file, shape, identity)
        yield writer
        writer.finish()


def read_route_trace(path: Path) -> RouteTrace:
    """Read a trace whole.

    Raises:
        FormatError: missing, unreadable, or not what the format promises.
    """
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
            size = path.stat().st_size
            parsed = _parse_header(path, header, size)
            body = file.read(size - _HEADER_BYTES)
    except FileNotFoundError:
        raise FormatError("no such file", path=path, fault="missing") from None
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror}", path=path) from error
    if len(body) != size - _HEADER_BYTES:
        raise FormatError(f"ends at byte {_HEADER_BYTES + len(body)}", path=path, fault="truncated")
    if zlib.crc32(body) != parsed.checksum:
        raise FormatError("damaged: the checksum of the ids differs", path=path, fault="checksum")
    shape, width = parsed.shape, parsed.shape.experts_per_token + parsed.guesses
    count = parsed.tokens * shape.layers * width
    rows = np.frombuffer(body, dtype="<u2", count=count).reshape(-1, shape.layers, width)
    ids, guesses = np.split(rows, [shape.experts_per_token], axis=2)
    if int(ids.max()) >= shape.experts:
        place = int(np.argmax(ids >= shape.experts))
        row, column = divmod(place, shape.experts_per_token)
        raise FormatError(
            f"expert id {int(ids.flat[place])}, expected 0..{shape.experts - 1}",
            path=path,
            offset=_HEADER_BYTES + 2 * (row * width + column),
        )
    step = max(1, _BLOCK // max(1, shape.layers * parsed.guesses))
    blocks = (guesses[first : first + step] for first in range(0, parsed.tokens, step))
    if not all(_are_guesses(block, shape.experts) for block in blocks):
        raise FormatError(
            f"a guess is no expert 0..{shape.experts - 1}, or a layer has some of its guesses only",
            path=path,
        )
    table = np.frombuffer(body, dtype=_RUN, offset=2 * count)
    known = "" if not any(parsed.identity) else parsed.identity.hex()
    runs = _parse_runs(path, table, parsed.tokens)
    return RouteTrace(shape, ids, runs, known, guesses if parsed.guesses else None)


def _are_guesses(guesses: npt.NDArray[np.integer], experts: int) -> bool:
    """Whether each row has experts alone, or nothing at all."""
    is_none = guesses == NO_GUESS
    is_sound = is_none | ((guesses >= 0) & (guesses < experts))
    return bool(is_sound.all() and (is_none.all(axis=2) | ~is_none.any(axis=2)).all())


@dataclass(frozen=True, slots=True)
class _Header:
    """What a header says that is needed to read the rest."""

    shape: RouteShape
    guesses: int
    tokens: int
    identity: bytes
    checksum: int


def _parse_header(path: Path, header: bytes, size: int) -> _Header:
    """The header, after every check that needs no body."""
    if len(header) < _HEADER_BYTES or header[:8] != MAGIC:
        found = f"{len(header)} bytes that begin with {header[:8]!r}"
        raise FormatError(f"not a route trace: expected {MAGIC!r}, found {found}", path=path)
    fields = _FIELDS.unpack_from(header)
    _, version, header_bytes, layers, experts, per_token, guesses, tokens, runs = fields[:9]
    check, tail = _CHECK.unpack_from(header, _FIELDS.size)
    if version not in (VERSION, VERSION_OF_GUESSES):
        expected = f"{VERSION} or {VERSION_OF_GUESSES}"
        raise FormatError(f"format version {version}, expected {expected}", path=path, offset=8)
    if check != zlib.crc32(header[: _FIELDS.size]):
        raise FormatError("damaged: the header's checksum differs", path=path, fault="checksum")
    faults = FaultList(path)
    if header_bytes != _HEADER_BYTES or any(tail):
        faults.add(f"header of {header_bytes} bytes, expected {_HEADER_BYTES}; reserved bits set?")
    least, most = (0, 0) if version == VERSION else (1, min(MOST_GUESSES, experts))
    if not least <= guesses <= most:
        faults.add(f"{guesses} guesses, expected {least}..{most} in version {version}")
    shape = RouteShape(layers, experts, per_token)
    problem = shape.problem()
    if problem is not None:
        faults.add(problem)
    if not 1 <= runs <= min(tokens, MOST_RUNS):
        limits = f"1..{MOST_RUNS:,} runs and a token in each"
        faults.add(f"{tokens} tokens in {runs} runs, expected {limits}")
    faults.raise_if_any("the header is damaged")
    wanted = _HEADER_BYTES + 2 * tokens * layers * (per_token + guesses) + _RUN.itemsize * runs
    if size != wanted:
        raise FormatError(
            f"{size:,} bytes, {wanted:,} expected for {tokens:,} tokens in {runs:,} runs",
            path=path,
            fault="truncated" if size < wanted else "format",
        )
    return _Header(shape, guesses, tokens, fields[9], fields[10])


def _parse_runs(path: Path, table: npt.NDArray[np.void], tokens: int) -> tuple[Run, ...]:
    names: dict[int, RunKind] = {1: "prefill", 2: "decode"}
    first = table["first"]
    is_sound = (
        int(first[0]) == 0
        and int(table["begins"][0]) == 1
        and bool((first[1:] > first[:-1]).all())
        and int(first[-1]) < tokens
        and set(table["kind"].tolist()) <= set(names)
        and set(table["begins"].tolist()) <= {0, 1}
    )
    if not is_sound:
        raise FormatError(
            f"the runs are damaged: expected rising tokens 0..{tokens - 1}, kinds 1 or 2, and a"
            " text that begins with the first",
            path=path,
        )
    return tuple(
        Run(int(row["first"]), names[int(row["kind"])], bool(row["begins"])) for row in table
    )
