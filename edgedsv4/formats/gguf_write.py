"""Writes GGUF files: one file, or a split set with a limited number of tensors per part.

Everything is collected and checked first; then each file is written under a temporary name beside
its target, synced, and only when all are complete renamed into place. A failure on the way leaves
neither halves nor temporaries behind. Source: the GGUF specification, version 3; split keys and
names as in the gguf-split tool of llama.cpp.
"""

from __future__ import annotations

import errno
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import CapacityError, ConfigError, ShapeError
from edgedsv4.formats.gguf_encode import label_bytes, string_bytes, value_bytes
from edgedsv4.formats.gguf_part import (
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_ALIGNMENT,
    MAX_DIMS,
)
from edgedsv4.formats.gguf_split import MAX_PARTS, part_name
from edgedsv4.formats.gguf_values import (
    MAX_KEY_BYTES,
    MAX_NAME_BYTES,
    GgufType,
    MetadataValue,
)
from edgedsv4.formats.whole_file import WholeFiles

if TYPE_CHECKING:
    from edgedsv4.formats.block_types import BlockType

VERSION = 3
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OWN_KEYS = ("general.alignment", "split.no", "split.count", "split.tensors.count")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor that waits to be written."""

    name: str
    shape: tuple[int, ...]
    block_type: BlockType
    data: memoryview


class GgufWriter:
    """Collects metadata and tensors, then writes them.

    Tensor data are not copied: they must stay as they are until `write` returns.
    """

    def __init__(
        self, path: Path, *, alignment: int = DEFAULT_ALIGNMENT, max_tensors: int | None = None
    ) -> None:
        """Prepare a file.

        Args:
            path: the file to write; must end in `.gguf` when the model may be split.
            alignment: bytes to whose multiples tensors are aligned, a power of two, 1..2^20.
            max_tensors: tensors per part, >= 1; more tensors than that make a split set
                `NAME-00001-of-0000N.gguf`. None writes one file.

        Raises:
            ConfigError: if an argument is out of its range.
        """
        if alignment & (alignment - 1) or not 1 <= alignment <= MAX_ALIGNMENT:
            raise ConfigError(
                f"alignment must be a power of two, 1..{MAX_ALIGNMENT}, found {alignment}"
            )
        if max_tensors is not None and max_tensors < 1:
            raise ConfigError(f"max_tensors must be >= 1, found {max_tensors}")
        if max_tensors is not None and path.suffix != ".gguf":
            raise ConfigError(f"a model that is split needs a name ending in .gguf, found {path}")
        self.path = Path(path)
        self.alignment = alignment
        self.max_tensors = max_tensors
        self._metadata: dict[str, bytes] = {}
        self._tensors: dict[str, _Tensor] = {}
        if alignment != DEFAULT_ALIGNMENT:
            self._metadata["general.alignment"] = value_bytes(alignment, GgufType.U32)

    def add_metadata(self, key: str, value: MetadataValue, value_type: GgufType) -> None:
        """Add one key.

        Args:
            key: 1..65,535 bytes of UTF-8 without NUL; each key once.
            value: a scalar; or a list or NumPy array, which becomes an array.
            value_type: type to store, of an array the type of its elements (lists in lists: ARRAY
                with elements of type STRING or, by their dtype, numbers).

        Raises:
            ConfigError: if the key is invalid or taken, or the value does not fit the type.
        """
        if key in self._metadata or key in _OWN_KEYS:
            raise ConfigError(f"key {key!r} is already set")
        label_bytes(key, "key", MAX_KEY_BYTES)
        try:
            self._metadata[key] = value_bytes(value, value_type)
        except (struct.error, OverflowError, ValueError, TypeError) as error:
            raise ConfigError(
                f"the value of key {key!r} does not fit {value_type.name}: {error}"
            ) from error

    def add_tensor(
        self,
        name: str,
        shape: Sequence[int],
        block_type: BlockType,
        data: npt.NDArray[np.generic] | bytes | bytearray | memoryview,
    ) -> None:
        """Add one tensor in its stored form.

        Args:
            name: 1..64 bytes of UTF-8 without NUL; each name once.
            shape: elements per dim, row-major, 1..4 dims.
            block_type: how `data` are coded.
            data: the stored bytes; an array of any dtype counts by its bytes and must be
                contiguous.

        Raises:
            ConfigError: if the name is invalid or taken, or GGUF cannot hold the type.
            ShapeError: if shape, type and length of the data disagree.
        """
        if name in self._tensors:
            raise ConfigError(f"tensor {name!r} is already set")
        label_bytes(name, "tensor name", MAX_NAME_BYTES)
        if block_type.ggml_id is None:
            raise ConfigError(f"tensor {name}: GGUF has no type {block_type.name}")
        raw = _flat_bytes(name, data)
        expected = _stored_bytes(name, tuple(shape), block_type)
        if raw.nbytes != expected:
            raise ShapeError(
                f"tensor {name}: {list(shape)} of {block_type.name} is {expected:,} bytes,"
                f" found {raw.nbytes:,}"
            )
        self._tensors[name] = _Tensor(name, tuple(shape), block_type, raw)

    def write(self) -> tuple[Path, ...]:
        """Write everything.

        Returns:
            the files, in order: `path`, or the parts of the set.

        Raises:
            CapacityError: if the disk is full; nothing is left behind, older files are as they
                were.
            ConfigError: if the set would have more than 65,535 parts, or a target is no file.
            OSError: if a file cannot be written for another reason.
        """
        parts = self._parts()
        try:
            with WholeFiles() as files:
                for target, metadata, tensors in parts:
                    with files.create(target) as file:
                        self._write_part(file, metadata, tensors)
        except OSError as error:
            if error.errno in _FULL:
                raise self._disk_full() from error
            raise
        return tuple(target for target, _, _ in parts)

    def _parts(self) -> list[tuple[Path, Mapping[str, bytes], list[_Tensor]]]:
        """Target, metadata and tensors of each file."""
        tensors = list(self._tensors.values())
        if self.max_tensors is None or len(tensors) <= self.max_tensors:
            return [(self.path, self._metadata, tensors)]
        starts = range(0, len(tensors), self.max_tensors)
        count = len(starts)
        if count > MAX_PARTS:
            raise ConfigError(
                f"max_tensors {self.max_tensors} makes {count:,} parts, more than {MAX_PARTS:,}"
            )
        alignment = {k: v for k, v in self._metadata.items() if k == "general.alignment"}
        prefix = self.path.stem
        parts: list[tuple[Path, Mapping[str, bytes], list[_Tensor]]] = []
        for number, start in enumerate(starts):
            split = {
                "split.no": value_bytes(number, GgufType.U16),
                "split.count": value_bytes(count, GgufType.U16),
                "split.tensors.count": value_bytes(len(tensors), GgufType.I32),
            }
            own = self._metadata if number == 0 else alignment
            target = self.path.with_name(part_name(prefix, number + 1, count))
            parts.append((target, {**own, **split}, tensors[start : start + self.max_tensors]))
        return parts

    def _write_part(
        self, file: BinaryIO, metadata: Mapping[str, bytes], tensors: Sequence[_Tensor]
    ) -> None:
        header = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
        for key, value in metadata.items():
            header += string_bytes(key) + value
        offset = 0
        for tensor in tensors:
            dims = tuple(reversed(tensor.shape))
            header += string_bytes(tensor.name)
            header += struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
            header += struct.pack("<IQ", tensor.block_type.ggml_id, offset)
            offset += tensor.data.nbytes + self._padding(tensor.data.nbytes)
        file.write(header + bytes(self._padding(len(header))))
        for tensor in tensors:
            file.write(tensor.data)
            file.write(bytes(self._padding(tensor.data.nbytes)))

    def _padding(self, nbytes: int) -> int:
        return -nbytes % self.alignment

    def _disk_full(self) -> CapacityError:
        needed = sum(t.data.nbytes for t in self._tensors.values())
        free = shutil.disk_usage(self.path.absolute().parent).free
        return CapacityError(
            f"{self.path}: the disk (or a quota) is full, nothing was written",
            needed_bytes=needed,
            available_bytes=free,
        )


def _flat_bytes(
    name: str, data: npt.NDArray[np.generic] | bytes | bytearray | memoryview
) -> memoryview:
    """The bytes of the data, without copying them."""
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise ShapeError(f"tensor {name}: the array is not contiguous")
        return data.reshape(-1).view(np.uint8).data
    return memoryview(data).cast("B")


def _stored_bytes(name: str, shape: tuple[int, ...], block_type: BlockType) -> int:
    if not 1 <= len(shape) <= MAX_DIMS or not all(0 < dim < 1 << 63 for dim in shape):
        raise ShapeError(f"tensor {name}: expected 1..{MAX_DIMS} dims above 0, found {list(shape)}")
    if shape[-1] % block_type.block_elements:
        raise ShapeError(
            f"tensor {name}: rows of {shape[-1]} elements, {block_type.name} needs a multiple of"
            f" {block_type.block_elements}"
        )
    rows = 1
    for dim in shape[:-1]:
        rows *= dim
    return rows * block_type.row_bytes(shape[-1])
