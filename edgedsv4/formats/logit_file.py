"""Saved logits of a text: what `perplexity --kld-save` writes and `--kld-base` compares with.

An uncompressed `.npz`, so that `numpy.load` reads it too, and rows stream in and out without the
whole array in memory. Members, in this order:

    header       int64 [4]: format version (1), vocabulary size V, tokens per window, rows N
    token_ids    int32 [N]: the token that row i predicts
    log_probs    float32 [N, V]: natural logarithms of the probabilities, window after window

Every window starts anew with the beginning-of-text token, which has no row.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import Fault, FormatError
from edgedsv4.formats.whole_file import whole_file

FORMAT_VERSION = 1
_MAX_ROWS = 1 << 40
_MEMBERS = ("header.npy", "token_ids.npy", "log_probs.npy")
# What zipfile raises on damage: BadZipFile is only one of them (RuntimeError: marked as encrypted).
_DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    NotImplementedError,
    struct.error,
    zipfile.BadZipFile,
)

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LogitHeader:
    """What the rows of a file belong to; two runs can be compared when these are equal."""

    vocab_size: int
    window: int
    """Tokens per window, the opening one included."""
    token_ids: npt.NDArray[np.int32]
    """[N]"""


class LogitWriter:
    """Takes rows in order and appends them to the file."""

    def __init__(self, file: IO[bytes], header: LogitHeader) -> None:
        self._file = file
        self._vocab_size = header.vocab_size
        self._left = len(header.token_ids)

    def append(self, rows: Rows) -> None:
        """Writes the next rows, float32 [n, V]; raises ValueError when shape or count disagree."""
        if rows.ndim != 2 or rows.shape[1] != self._vocab_size or len(rows) > self._left:
            raise ValueError(
                f"rows are {list(rows.shape)}, expected [up to {self._left}, {self._vocab_size}]"
            )
        self._left -= len(rows)
        self._file.write(np.ascontiguousarray(rows, dtype="<f4").tobytes())

    def check_complete(self) -> None:
        """Raises ValueError when rows are missing."""
        if self._left:
            raise ValueError(f"{self._left} rows were not written")


@contextmanager
def write_logits(path: Path, header: LogitHeader) -> Iterator[LogitWriter]:
    """Opens a file for writing; it takes its name only when all rows are in it.

    Raises:
        ConfigError: when `path` is no file.
        OSError: when the file cannot be written; nothing is left behind.
    """
    count = len(header.token_ids)
    numbers = np.array([FORMAT_VERSION, header.vocab_size, header.window, count], dtype="<i8")
    with whole_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in (("header.npy", numbers), ("token_ids.npy", header.token_ids)):
            with archive.open(name, "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
        with archive.open("log_probs.npy", "w", force_zip64=True) as member:
            member.write(_array_header("<f4", (count, header.vocab_size)))
            writer = LogitWriter(member, header)
            yield writer
            writer.check_complete()


class LogitReader:
    """Gives rows in order, after the header was checked."""

    def __init__(self, path: Path, header: LogitHeader, file: IO[bytes]) -> None:
        self.header = header
        self._path = path
        self._file = file

    def take(self, count: int) -> Rows:
        """The next `count` rows, [count, V]; raises FormatError when the file ends early."""
        wanted = count * self.header.vocab_size * 4
        data = _guarded_read(self._path, self._file, wanted)
        if len(data) != wanted:
            raise FormatError(
                f"log_probs end {wanted - len(data):,} bytes early; save the logits again",
                path=self._path,
                fault="truncated",
            )
        rows = np.frombuffer(data, dtype="<f4").reshape(count, self.header.vocab_size)
        if not np.isfinite(rows).all():
            raise FormatError("log_probs hold NaN or infinity; save them again", path=self._path)
        return rows


@contextmanager
def read_logits(path: Path) -> Iterator[LogitReader]:
    """Opens saved logits; the header and the sizes are checked, rows are read when they are taken.

    Raises:
        FormatError: when the file is missing, damaged, or of another format.
    """
    with ExitStack() as stack:
        try:
            archive = stack.enter_context(zipfile.ZipFile(path))
            members = [stack.enter_context(_open_member(path, archive, n)) for n in _MEMBERS]
        except _DAMAGE as error:
            fault: Fault = "missing" if isinstance(error, FileNotFoundError) else "format"
            what = f"not a file of saved logits: {error}"
            raise FormatError(what, path=path, fault=fault) from None
        numbers = _read_array(path, members[0], "header", "<i8", (4,))
        version, vocab_size, window, count = (int(n) for n in numbers)
        if version != FORMAT_VERSION:
            raise FormatError(f"format version {version}, expected {FORMAT_VERSION}", path=path)
        if vocab_size < 1 or window < 2 or not 1 <= count <= _MAX_ROWS:
            raise FormatError(
                f"header says V={vocab_size}, window={window}, rows={count}; out of range",
                path=path,
            )
        _check_sizes(path, archive, count, vocab_size)
        token_ids = _read_array(path, members[1], "token_ids", "<i4", (count,))
        _check_array_header(path, members[2], "log_probs", "<f4", (count, vocab_size))
        yield LogitReader(path, LogitHeader(vocab_size, window, token_ids), members[2])


def _open_member(path: Path, archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise FormatError(f"no member {name}; not a file of saved logits", path=path) from None
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise FormatError(f"member {name} is compressed, expected stored bytes", path=path)
    return archive.open(info)


def _check_sizes(path: Path, archive: zipfile.ZipFile, count: int, vocab_size: int) -> None:
    """Refuses counts that the file cannot hold, before anything is allocated for them."""
    for name, wanted in (("token_ids.npy", 4 * count), ("log_probs.npy", 4 * count * vocab_size)):
        found = min(archive.getinfo(name).file_size, path.stat().st_size)
        if found < wanted:
            raise FormatError(f"{name} has {found:,} bytes, {wanted:,} expected", path=path)


def _array_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The bytes that open a `.npy` array of this form."""
    buffer = io.BytesIO()
    form = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, form)
    return buffer.getvalue()


def _check_array_header(
    path: Path, member: IO[bytes], name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    """Compares bytes: only one form is right, so nothing has to be parsed."""
    expected = _array_header(dtype, shape)
    if _guarded_read(path, member, len(expected)) != expected:
        raise FormatError(f"{name} is not a {dtype} array {list(shape)}", path=path)


def _read_array(
    path: Path, member: IO[bytes], name: str, dtype: str, shape: tuple[int, ...]
) -> npt.NDArray[np.int32]:
    _check_array_header(path, member, name, dtype, shape)
    wanted = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = _guarded_read(path, member, wanted)
    if len(data) != wanted:
        raise FormatError(f"{name} ends early", path=path, fault="truncated")
    return np.frombuffer(data, dtype=dtype)


def _guarded_read(path: Path, member: IO[bytes], size: int) -> bytes:
    """Reads from a member; a wrong checksum or a truncated archive is a FormatError."""
    try:
        return member.read(size)
    except _DAMAGE as error:
        # zipfile has no class of its own for a wrong CRC-32.
        fault: Fault = "checksum" if isinstance(error, zipfile.BadZipFile) else "format"
        fault = "truncated" if isinstance(error, EOFError) else fault
        what = str(error) or "it ends early"
        raise FormatError(f"damaged: {what}", path=path, fault=fault) from None
