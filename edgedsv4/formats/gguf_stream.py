"""Writes GGUF files of any size: the header from shapes alone, then tensor data piece by piece.

`gguf_write` collects tensors and therefore needs them all at once; here a tensor is made while it
is written, so memory is bounded by one piece. Several files (parts of a split set, a model and its
MTP block) appear together: each grows under a temporary name, and only when all are complete and
synced are they renamed. A failure on the way, cancelling included, leaves nothing behind.

Source: the GGUF specification, version 3; split keys and names as in the gguf-split tool of
llama.cpp.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import CapacityError, ConfigError, ShapeError
from edgedsv4.formats.gguf_encode import label_bytes, string_bytes, value_bytes
from edgedsv4.formats.gguf_part import DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS
from edgedsv4.formats.gguf_split import MAX_PARTS, part_name
from edgedsv4.formats.gguf_values import MAX_KEY_BYTES, MAX_NAME_BYTES, GgufType, MetadataValue

if TYPE_CHECKING:
    from edgedsv4.formats.block_types import BlockType

_VERSION: Final = 3
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OWN_KEYS: Final = ("general.alignment", "split.no", "split.count", "split.tensors.count")

Pieces = Callable[[], Iterable[npt.NDArray[np.uint8]]]
"""Makes the stored bytes of a tensor, in order, any number of contiguous uint8 arrays."""


@dataclass(frozen=True, slots=True)
class MetadataEntry:
    """One key of a header."""

    key: str
    value: MetadataValue
    value_type: GgufType
    """Of an array, the type of its elements."""


@dataclass(frozen=True, slots=True)
class StreamedTensor:
    """One tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    """Elements per dim, row-major."""
    block_type: BlockType
    pieces: Pieces

    @property
    def nbytes(self) -> int:
        """Stored bytes, without padding."""
        return prod(self.shape[:-1]) * self.block_type.row_bytes(self.shape[-1])


@dataclass(frozen=True, slots=True)
class StreamedFile:
    """One model file, or split set, that will be written."""

    path: Path
    metadata: Sequence[MetadataEntry]
    tensors: Sequence[StreamedTensor]


@dataclass(frozen=True, slots=True)
class _Part:
    target: Path
    header: bytes
    tensors: Sequence[StreamedTensor]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(_padded(tensor.nbytes) for tensor in self.tensors)


def stream_gguf(
    files: Sequence[StreamedFile],
    *,
    split_max_bytes: int | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> tuple[Path, ...]:
    """Write files that belong together.

    Args:
        files: what to write; paths must differ.
        split_max_bytes: tensor bytes per part, >= 1; a model with more becomes a split set
            `NAME-00001-of-0000N.gguf` (a tensor is never cut). None writes one file each.
        on_bytes: called with the bytes of every piece after it was written; what it raises ends
            the writing.

    Returns:
        the files, in order.

    Raises:
        CapacityError: the disk is too small or full; nothing is left behind, older files are as
            they were.
        ConfigError: a key, name or path cannot be used.
        ShapeError: a shape does not fit its type, or the pieces do not fit the shape.
        OSError: a file cannot be written for another reason.
    """
    parts = [part for file in files for part in _parts(file, split_max_bytes)]
    _check_targets([part.target for part in parts])
    needed_bytes = sum(part.nbytes for part in parts)
    for directory in {part.target.absolute().parent for part in parts}:
        free = shutil.disk_usage(directory).free
        if free < needed_bytes:
            raise CapacityError(
                f"{directory}: not enough free space on the disk",
                needed_bytes=needed_bytes,
                available_bytes=free,
            )
    return _write_all(parts, needed_bytes, on_bytes or (lambda _: None))


def _write_all(
    parts: Sequence[_Part], needed_bytes: int, on_bytes: Callable[[int], None]
) -> tuple[Path, ...]:
    done: list[tuple[Path, Path]] = []
    try:
        for part in parts:
            name = f".{part.target.name[:40]}.{secrets.token_hex(6)}.partial"
            temporary = part.target.with_name(name)
            done.append((temporary, part.target))
            with temporary.open("xb") as file:
                _write_part(file, part, on_bytes)
                file.flush()
                os.fsync(file.fileno())
        for temporary, target in done:
            temporary.replace(target)
        for directory in {target.absolute().parent for _, target in done}:
            _sync_directory(directory)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        directory = parts[0].target.absolute().parent
        raise CapacityError(
            f"{directory}: the disk (or a quota) is full, nothing was written",
            needed_bytes=needed_bytes,
            available_bytes=shutil.disk_usage(directory).free,
        ) from error
    finally:
        for temporary, _ in done:
            with suppress(FileNotFoundError):
                temporary.unlink()
    return tuple(target for _, target in done)


def _write_part(file: BinaryIO, part: _Part, on_bytes: Callable[[int], None]) -> None:
    file.write(part.header)
    for tensor in part.tensors:
        written = 0
        for piece in tensor.pieces():
            file.write(piece.data)
            written += piece.nbytes
            on_bytes(piece.nbytes)
        if written != tensor.nbytes:
            raise ShapeError(
                f"tensor {tensor.name}: {list(tensor.shape)} of {tensor.block_type.name} is"
                f" {tensor.nbytes:,} bytes, found {written:,}"
            )
        file.write(bytes(_padded(written) - written))


def _parts(file: StreamedFile, split_max_bytes: int | None) -> Iterator[_Part]:
    """The files that one model becomes."""
    known: set[str] = set()
    for tensor in file.tensors:
        _check_tensor(tensor)
        if tensor.name in known:
            raise ConfigError(f"tensor {tensor.name!r} is set twice")
        known.add(tensor.name)
    groups = _groups(file.tensors, split_max_bytes)
    entries = {entry.key: _entry_bytes(entry) for entry in file.metadata}
    if len(entries) != len(file.metadata) or not entries.keys().isdisjoint(_OWN_KEYS):
        raise ConfigError("a metadata key is set twice, or is one that the writer sets itself")
    if len(groups) == 1:
        yield _Part(file.path, _header(entries.values(), file.tensors), file.tensors)
        return
    if file.path.suffix != ".gguf":
        raise ConfigError(f"a model that is split needs a name ending in .gguf, found {file.path}")
    for number, tensors in enumerate(groups):
        keys = list(entries.values()) if number == 0 else []
        for key, value, value_type in (
            ("split.no", number, GgufType.U16),
            ("split.count", len(groups), GgufType.U16),
            ("split.tensors.count", len(file.tensors), GgufType.I32),
        ):
            keys.append(_entry_bytes(MetadataEntry(key, value, value_type)))
        target = file.path.with_name(part_name(file.path.stem, number + 1, len(groups)))
        yield _Part(target, _header(keys, tensors), tensors)


def _groups(
    tensors: Sequence[StreamedTensor], split_max_bytes: int | None
) -> list[list[StreamedTensor]]:
    """Tensors per part: as many as fit, in order, but at least one."""
    if split_max_bytes is not None and split_max_bytes < 1:
        raise ConfigError(f"split_max_bytes must be >= 1, found {split_max_bytes}")
    groups: list[list[StreamedTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = _padded(tensor.nbytes)
        if split_max_bytes is not None and groups[-1] and filled + size > split_max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    if len(groups) > MAX_PARTS:
        raise ConfigError(
            f"split_max_bytes {split_max_bytes:,} makes {len(groups):,} parts,"
            f" more than {MAX_PARTS:,}"
        )
    return groups


def _entry_bytes(entry: MetadataEntry) -> bytes:
    label_bytes(entry.key, "key", MAX_KEY_BYTES)
    try:
        return string_bytes(entry.key) + value_bytes(entry.value, entry.value_type)
    except (struct.error, OverflowError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the value of key {entry.key!r} does not fit {entry.value_type.name}: {error}"
        ) from error


def _header(entries: Iterable[bytes], tensors: Sequence[StreamedTensor]) -> bytes:
    """Everything before the tensor data, padding included."""
    keys = list(entries)
    header = bytearray(MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(keys)))
    header += b"".join(keys)
    offset = 0
    for tensor in tensors:
        dims = tuple(reversed(tensor.shape))
        header += string_bytes(tensor.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        header += struct.pack("<IQ", tensor.block_type.ggml_id, offset)
        offset += _padded(tensor.nbytes)
    return bytes(header) + bytes(_padded(len(header)) - len(header))


def _check_tensor(tensor: StreamedTensor) -> None:
    label_bytes(tensor.name, "tensor name", MAX_NAME_BYTES)
    if tensor.block_type.ggml_id is None:
        raise ConfigError(f"tensor {tensor.name}: GGUF has no type {tensor.block_type.name}")
    if not 1 <= len(tensor.shape) <= MAX_DIMS or min(tensor.shape) < 1:
        raise ShapeError(
            f"tensor {tensor.name}: expected 1..{MAX_DIMS} dims above 0, found {list(tensor.shape)}"
        )
    if tensor.shape[-1] % tensor.block_type.block_elements:
        raise ShapeError(
            f"tensor {tensor.name}: rows of {tensor.shape[-1]} elements, {tensor.block_type.name}"
            f" needs a multiple of {tensor.block_type.block_elements}"
        )


def _check_targets(targets: Sequence[Path]) -> None:
    if len(set(targets)) != len(targets):
        raise ConfigError("two files to be written have the same path")
    for target in targets:
        if target.is_dir():
            raise ConfigError(f"{target}: expected a file name, found a directory")


def _sync_directory(directory: Path) -> None:
    """Make renames durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % DEFAULT_ALIGNMENT
