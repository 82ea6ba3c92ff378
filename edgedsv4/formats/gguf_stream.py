"""Writes GGUF files of any size: the header from shapes alone, then tensor data piece by piece.

A tensor is made while it is written, so memory is bounded by one piece. Several files (parts of a
split set, a model and its MTP block) appear together; a failure on the way, cancelling included,
leaves nothing behind. `gguf_write` is the same for tensors that are all in memory.

Source: the GGUF specification, version 3; split keys and names as in the gguf-split tool of
llama.cpp.
"""

from __future__ import annotations

import errno
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from edgedsv4.formats.whole_file import WholeFiles

if TYPE_CHECKING:
    from edgedsv4.formats.block_types import BlockType

_VERSION: Final = 3
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OWN_KEYS: Final = ("general.alignment", "split.no", "split.count", "split.tensors.count")
"""Keys that the writer sets itself."""

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
class FilePart:
    """One file of a set, ready to be written."""

    target: Path
    entries: Sequence[bytes]
    """Keys with their values, encoded."""
    tensors: Sequence[StreamedTensor]
    alignment: int = DEFAULT_ALIGNMENT

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        data = sum(_padded(tensor.nbytes, self.alignment) for tensor in self.tensors)
        return len(self.header()) + data

    def header(self) -> bytes:
        """Everything before the tensor data, padding included."""
        counts = struct.pack("<IQQ", _VERSION, len(self.tensors), len(self.entries))
        header = bytearray(MAGIC + counts + b"".join(self.entries))
        offset = 0
        for tensor in self.tensors:
            dims = tuple(reversed(tensor.shape))
            header += string_bytes(tensor.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
            header += struct.pack("<IQ", tensor.block_type.ggml_id, offset)
            offset += _padded(tensor.nbytes, self.alignment)
        return bytes(header).ljust(_padded(len(header), self.alignment), b"\0")


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
    return write_parts(parts, on_bytes)


def write_parts(
    parts: Sequence[FilePart], on_bytes: Callable[[int], None] | None = None
) -> tuple[Path, ...]:
    """Write files that appear together.

    Args:
        parts: the files; at least one.
        on_bytes: as for `stream_gguf`.

    Returns:
        their paths, in order.

    Raises:
        As `stream_gguf`.
    """
    try:
        with WholeFiles() as files:
            for part in parts:
                with files.create(part.target) as file:
                    _write_part(file, part, on_bytes or (lambda _: None))
    except OSError as error:
        if error.errno not in _FULL:
            raise
        directory = parts[0].target.absolute().parent
        raise CapacityError(
            f"{directory}: the disk (or a quota) is full, nothing was written",
            needed_bytes=sum(part.nbytes for part in parts),
            available_bytes=shutil.disk_usage(directory).free,
        ) from error
    return tuple(part.target for part in parts)


def _write_part(file: BinaryIO, part: FilePart, on_bytes: Callable[[int], None]) -> None:
    file.write(part.header())
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
        file.write(bytes(_padded(written, part.alignment) - written))


def _parts(file: StreamedFile, split_max_bytes: int | None) -> Iterator[FilePart]:
    """The files that one model becomes."""
    known: set[str] = set()
    for tensor in file.tensors:
        check_tensor(tensor)
        if tensor.name in known:
            raise ConfigError(f"tensor {tensor.name!r} is set twice")
        known.add(tensor.name)
    groups = _groups(file.tensors, split_max_bytes)
    entries = {entry.key: entry_bytes(entry) for entry in file.metadata}
    if len(entries) != len(file.metadata) or not entries.keys().isdisjoint(OWN_KEYS):
        raise ConfigError("a metadata key is set twice, or is one that the writer sets itself")
    if len(groups) == 1:
        yield FilePart(file.path, list(entries.values()), file.tensors)
        return
    if file.path.suffix != ".gguf":
        raise ConfigError(f"a model that is split needs a name ending in .gguf, found {file.path}")
    for number, tensors in enumerate(groups):
        keys = list(entries.values()) if number == 0 else []
        keys += split_entries(number, len(groups), len(file.tensors))
        target = file.path.with_name(part_name(file.path.stem, number + 1, len(groups)))
        yield FilePart(target, keys, tensors)


def _groups(
    tensors: Sequence[StreamedTensor], split_max_bytes: int | None
) -> list[list[StreamedTensor]]:
    """Tensors per part: as many as fit, in order, but at least one."""
    if split_max_bytes is not None and split_max_bytes < 1:
        raise ConfigError(f"split_max_bytes must be >= 1, found {split_max_bytes}")
    groups: list[list[StreamedTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = _padded(tensor.nbytes, DEFAULT_ALIGNMENT)
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


def split_entries(number: int, count: int, tensors: int) -> list[bytes]:
    """Keys of part `number` (from 0) of a set of `count` files with `tensors` tensors in all."""
    values = (
        MetadataEntry("split.no", number, GgufType.U16),
        MetadataEntry("split.count", count, GgufType.U16),
        MetadataEntry("split.tensors.count", tensors, GgufType.I32),
    )
    return [entry_bytes(entry) for entry in values]


def entry_bytes(entry: MetadataEntry) -> bytes:
    """Encode one key with its value.

    Raises:
        ConfigError: if the key is invalid, or the value does not fit the type.
    """
    label_bytes(entry.key, "key", MAX_KEY_BYTES)
    try:
        return string_bytes(entry.key) + value_bytes(entry.value, entry.value_type)
    except (struct.error, OverflowError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the value of key {entry.key!r} does not fit {entry.value_type.name}: {error}"
        ) from error


def check_tensor(tensor: StreamedTensor) -> None:
    """Raise if GGUF cannot hold a tensor of this name, shape and type.

    Raises:
        ConfigError: for its name or type.
        ShapeError: for its shape.
    """
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


def _padded(nbytes: int, alignment: int) -> int:
    return nbytes + -nbytes % alignment
