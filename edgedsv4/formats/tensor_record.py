"""Where one tensor lies on disk and how it is stored; known before its bytes are touched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from edgedsv4.formats.block_types import BlockType
    from edgedsv4.formats.mapped_file import MappedFile


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One stored tensor; its range was checked against the file when the header was read."""

    name: str
    """Name in the file's own dialect."""
    shape: tuple[int, ...]
    """Elements per dim, row-major: matrices `[out, in]`, stacked experts `[E, out, in]`."""
    block_type: BlockType
    """How the elements are stored."""
    nbytes: int
    """Bytes of the stored form."""
    offset: int
    """First byte, absolute in `file`."""
    file: MappedFile
    """The mapping that holds the bytes."""
    stride: int = 0
    """Of a stack whose parts do not follow each other: bytes from one part of the first dim to the
    next. 0 for all other tensors."""

    def part(self, index: int) -> TensorRecord:
        """One part of a stack with a stride."""
        count = self.shape[0]
        return replace(
            self,
            name=f"{self.name}[{index}]",
            shape=self.shape[1:],
            nbytes=self.nbytes // count,
            offset=self.offset + index * self.stride,
            stride=0,
        )

    def data(self) -> npt.NDArray[np.uint8]:
        """The stored bytes, uint8 [nbytes], read-only and not copied; with a stride, a copy.

        Raises:
            FormatError: if the file is no longer the one that was opened.
        """
        self.file.check_unchanged()
        if self.stride:
            return np.concatenate([self.part(index).data() for index in range(self.shape[0])])
        return self.file.view(self.offset, self.nbytes)
