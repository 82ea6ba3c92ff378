"""Opens an expert pack: the routed experts of a model, each in one piece.

Header and index are checked whole, the experts stay in the mapping. Behind the last expert of a
version 2 pack may stand a JSON object with measured frequencies.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgedsv4.errors import FormatError
from edgedsv4.formats.expert_pack_header import (
    HEADER_BYTES,
    IDENTITY_PAYLOAD,
    ROLES,
    TRIPLET_OBJECTS,
    PackHeader,
    parse_header,
)
from edgedsv4.formats.expert_pack_index import ENTRY, Entries, PackShape, check_index
from edgedsv4.formats.expert_pack_trailer import MAX_TRAILER_BYTES, ExpertFrequency, parse_trailer
from edgedsv4.formats.faults import FaultList
from edgedsv4.formats.mapped_file import MappedFile

if TYPE_CHECKING:
    from edgedsv4.formats.expert_pack_layout import PackLayout


@dataclass(frozen=True)
class ExpertPack:
    """An opened pack; close it, or use it as a context manager."""

    path: Path
    file: MappedFile
    header: PackHeader
    shape: PackShape
    layout: PackLayout
    entries: Entries = field(repr=False)
    """The index, a read-only view of the mapping."""
    frequency: ExpertFrequency | None
    """How often each expert was used when somebody counted; version 2 only."""

    def place(self, layer: int, expert: int, role: int) -> tuple[int, int]:
        """(first byte, bytes) of one matrix; roles as in `ROLES`."""
        return self.layout.layers[layer].place(expert, role)

    def digests(self, layer: int, expert: int) -> tuple[bytes, ...] | None:
        """SHA-256 of an expert's matrices, in order of the roles; None for a layer not inside."""
        first = (layer * self.header.num_experts + expert) * len(ROLES)
        if layer >= len(self.layout.layers):
            return None
        found = self.entries[first : first + len(ROLES)]["checksum"]
        return tuple(digest.tobytes() for digest in found)

    def index_sha256(self) -> str:
        """Hex digest of the index, by which a manifest knows its pack."""
        nbytes = self.header.index_end - HEADER_BYTES
        return hashlib.sha256(self.file.view(HEADER_BYTES, nbytes).data).hexdigest()

    def close(self) -> None:
        """Close the file; views already handed out stay valid until garbage collected."""
        self.file.close()

    def __enter__(self) -> ExpertPack:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_expert_pack(path: Path) -> ExpertPack:
    """Open a pack and check header, index and size.

    Args:
        path: the pack itself, not its manifest.

    Raises:
        FormatError: missing, of another format, damaged or truncated; everything that is wrong
            with header and index is listed.
    """
    with ExitStack() as stack:
        file = stack.enter_context(MappedFile.open(path))
        if file.size < HEADER_BYTES:
            raise FormatError(
                f"{file.size} bytes, too short for an expert pack: truncated copy?",
                path=path,
                offset=0,
                fault="truncated",
            )
        faults = FaultList(file.path)
        header = parse_header(file.view(0, HEADER_BYTES).tobytes(), file.size, faults)
        faults.raise_if_any("the header of the expert pack is damaged")
        if header is None:
            raise AssertionError("a header that cannot be used has a fault")
        index = file.view(HEADER_BYTES, header.index_end - HEADER_BYTES)
        entries = np.frombuffer(index.data, dtype=ENTRY)
        found = check_index(entries, header, faults)
        faults.raise_if_any("the index of the expert pack is damaged")
        if found is None:
            raise AssertionError("an index that cannot be used has a fault")
        shape, layout = found
        frequency = _behind_experts(file, header, layout)
        stack.pop_all()
    return ExpertPack(file.path, file, header, shape, layout, entries, frequency)


def _behind_experts(
    file: MappedFile, header: PackHeader, layout: PackLayout
) -> ExpertFrequency | None:
    """Check that the file ends where it must, and read what may follow the experts."""
    expected = layout.flags | IDENTITY_PAYLOAD | TRIPLET_OBJECTS
    if header.flags != expected:
        raise FormatError(
            f"flags are {header.flags:#x}, by the sizes of the matrices they are {expected:#x}",
            path=file.path,
            offset=36,
        )
    if file.size < layout.data_end:
        raise FormatError(
            f"{file.size:,} of {layout.data_end:,} bytes present, the last expert is cut off:"
            " truncated copy?",
            path=file.path,
            offset=file.size,
            fault="truncated",
        )
    rest = file.size - layout.data_end
    if rest == 0:
        return None
    if header.version == 1 or rest > MAX_TRAILER_BYTES:
        raise FormatError(
            f"{rest:,} bytes behind the last expert belong to nothing",
            path=file.path,
            offset=layout.data_end,
        )
    try:
        text = file.view(layout.data_end, rest).tobytes()
        return parse_trailer(text, header.num_layers, header.num_experts)
    except ValueError as error:
        raise FormatError(
            f"what follows the last expert {error}", path=file.path, offset=layout.data_end
        ) from error
