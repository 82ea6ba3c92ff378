"""Where one tensor lies on disk and how it is stored; known before its bytes are touched."""

from __future__ import annotations

from dataclasses import dataclass
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

    def data(self) -> npt.NDArray[np.uint8]:
        """The stored bytes, uint8 [nbytes], read-only and not copied.

        Raises:
            FormatError: if the file is no longer the one that was opened.
        """
        self.file.check_unchanged()
        return self.file.view(self.offset, self.nbytes)
