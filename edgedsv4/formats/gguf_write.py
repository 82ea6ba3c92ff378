"""Writes GGUF files from tensors in memory: one file, or a split set with so many per part.

Everything is collected and checked first; `gguf_stream` then writes it, all files or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import ConfigError, ShapeError
from edgedsv4.formats.gguf_part import DEFAULT_ALIGNMENT, MAX_ALIGNMENT
from edgedsv4.formats.gguf_split import MAX_PARTS, part_name
from edgedsv4.formats.gguf_stream import (
    OWN_KEYS,
    FilePart,
    MetadataEntry,
    StreamedTensor,
    check_tensor,
    entry_bytes,
    split_entries,
    write_parts,
)
from edgedsv4.formats.gguf_values import GgufType, MetadataValue

if TYPE_CHECKING:
    from edgedsv4.formats.block_types import BlockType


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
        self._entries: dict[str, bytes] = {}
        self._tensors: dict[str, StreamedTensor] = {}
        if alignment != DEFAULT_ALIGNMENT:
            entry = MetadataEntry("general.alignment", alignment, GgufType.U32)
            self._entries[entry.key] = entry_bytes(entry)

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
        if key in self._entries or key in OWN_KEYS:
            raise ConfigError(f"key {key!r} is already set")
        self._entries[key] = entry_bytes(MetadataEntry(key, value, value_type))

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
        raw = _flat_bytes(name, data)
        tensor = StreamedTensor(name, tuple(shape), block_type, lambda: (raw,))
        check_tensor(tensor)
        if raw.nbytes != tensor.nbytes:
            raise ShapeError(
                f"tensor {name}: {list(shape)} of {block_type.name} is {tensor.nbytes:,} bytes,"
                f" found {raw.nbytes:,}"
            )
        self._tensors[name] = tensor

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
        return write_parts(self._parts())

    def _parts(self) -> list[FilePart]:
        entries, tensors = list(self._entries.values()), list(self._tensors.values())
        if self.max_tensors is None or len(tensors) <= self.max_tensors:
            return [FilePart(self.path, entries, tensors, self.alignment)]
        starts = range(0, len(tensors), self.max_tensors)
        count = len(starts)
        if count > MAX_PARTS:
            raise ConfigError(
                f"max_tensors {self.max_tensors} makes {count:,} parts, more than {MAX_PARTS:,}"
            )
        alignment = [entry for key, entry in self._entries.items() if key in OWN_KEYS]
        parts = []
        for number, start in enumerate(starts):
            keys = [
                *(entries if number == 0 else alignment),
                *split_entries(number, count, len(tensors)),
            ]
            target = self.path.with_name(part_name(self.path.stem, number + 1, count))
            chosen = tensors[start : start + self.max_tensors]
            parts.append(FilePart(target, keys, chosen, self.alignment))
        return parts


def _flat_bytes(
    name: str, data: npt.NDArray[np.generic] | bytes | bytearray | memoryview
) -> npt.NDArray[np.uint8]:
    """The bytes of the data, without copying them."""
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise ShapeError(f"tensor {name}: the array is not contiguous")
        return data.reshape(-1).view(np.uint8)
    return np.asarray(memoryview(data).cast("B"))
