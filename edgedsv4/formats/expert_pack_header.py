"""The fixed head of an expert pack: 176 bytes that say which pack it is and how it is laid out.

Two formats share it. `SGLANG-EXPERTPACK-v1` holds MXFP4 experts of one size and is read by SGLang
too; `EDGEDSV4-XPACK-2` holds any block type, each role of each layer with its own size.

Source: the expert pack of SGLang; docs/expert-pack.md for version 2.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

from edgedsv4.config import MAX_EXPERTS, MAX_LAYERS
from edgedsv4.formats.faults import FaultList, quoted

MAGICS: Final = {1: b"SGLANG-EXPERTPACK-v1", 2: b"EDGEDSV4-XPACK-2"}
"""First bytes of a pack, by version; NUL bytes fill the field."""
FORMATS: Final = {version: magic.decode() for version, magic in MAGICS.items()}
"""What manifests call the versions."""
HEADER_BYTES: Final = 176
ENTRY_BYTES: Final = 328
ROLES: Final = ("gate", "up", "down")
"""The matrices of an expert in the order of the file: w1, w3, w2."""
DEFAULT_ALIGNMENT: Final = 4096

IDENTITY_PAYLOAD: Final = 1
"""Flag: the payload is the bytes of the source, unchanged."""
TRIPLET_OBJECTS: Final = 2
"""Flag: the three matrices of an expert lie together."""
ROLE_SIZES_VARY: Final = 4
"""Flag, version 2: the matrices of an expert differ in size."""
LAYER_STRIDE_VARIES: Final = 8
"""Flag, version 2: layers differ in the distance of their experts."""

_REQUIRED: Final = IDENTITY_PAYLOAD | TRIPLET_OBJECTS
_KNOWN: Final = {1: _REQUIRED, 2: _REQUIRED | ROLE_SIZES_VARY | LAYER_STRIDE_VARIES}
_HEADER: Final = struct.Struct("<24sIIIIQQQIIII32s32s32s")
_MAGIC_FIELD: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PackHeader:
    """The header of a pack."""

    version: int = 1
    """1 or 2."""
    flags: int = _REQUIRED
    data_start: int
    """First byte of the first expert."""
    alignment: int = DEFAULT_ALIGNMENT
    """Bytes to whose multiples experts are aligned, a power of two."""
    num_layers: int
    num_experts: int
    """Routed experts per layer."""
    top_k: int
    """Routed experts of one token."""
    model_identity: bytes
    """Digest of source and configuration, 32 bytes."""
    source_sha256: bytes
    """Digest of the source, 32 bytes."""
    config_sha256: bytes
    """Digest of the configuration that the pack was built with, 32 bytes."""

    @property
    def index_count(self) -> int:
        """Entries of the index."""
        return self.num_layers * self.num_experts * len(ROLES)

    @property
    def index_end(self) -> int:
        """First byte behind the index."""
        return HEADER_BYTES + self.index_count * ENTRY_BYTES

    def encode(self) -> bytes:
        """The 176 bytes."""
        return _HEADER.pack(
            MAGICS[self.version],
            self.version,
            HEADER_BYTES,
            ENTRY_BYTES,
            self.flags,
            self.index_count,
            self.data_start,
            self.alignment,
            self.num_layers,
            self.num_experts,
            self.top_k,
            len(ROLES),
            self.model_identity,
            self.source_sha256,
            self.config_sha256,
        )


def is_pack(start: bytes) -> bool:
    """Whether a file that begins with these bytes (24 at least) is an expert pack."""
    return any(start.startswith(magic) for magic in MAGICS.values())


def model_identity(source_sha256: bytes, config_sha256: bytes) -> bytes:
    """The digest by which packs of one model are known."""
    text = f"sglang-deepseek-expert-pack-v1:{source_sha256.hex()}:{config_sha256.hex()}"
    return hashlib.sha256(text.encode("ascii")).digest()


def generation(identity: bytes, source_sha256: bytes, layer: int, expert: int) -> int:
    """The number that tells one expert of one pack from every other; never 0."""
    text = f"{identity.hex()}:{source_sha256.hex()}:{layer}:{expert}"
    digest = hashlib.sha256(text.encode("ascii")).digest()
    return int.from_bytes(digest[:8], "little") or 1


def parse_header(data: bytes, size: int, faults: FaultList) -> PackHeader | None:
    """Check the first bytes of a pack.

    Args:
        data: at least 176 bytes.
        size: bytes of the file.
        faults: takes what is wrong.

    Returns:
        The header; None if the rest of the file cannot be found by it.
    """
    magic, version, header_bytes, entry_bytes, flags, *rest = _HEADER.unpack_from(data)
    count, start, alignment, layers, experts, top_k, roles, identity, source, config = rest
    if magic not in {text.ljust(_MAGIC_FIELD, b"\0") for text in MAGICS.values()}:
        known = " or ".join(quoted(text) for text in MAGICS.values())
        faults.add(f"it begins with {quoted(magic)}, expected {known}: not an expert pack")
        return None
    if MAGICS.get(version, b"?").ljust(_MAGIC_FIELD, b"\0") != magic:
        faults.add(f"version is {version}, which does not go with {quoted(magic.rstrip(bytes(1)))}")
        return None
    for name, value, expected in (
        ("header_bytes", header_bytes, HEADER_BYTES),
        ("entry_bytes", entry_bytes, ENTRY_BYTES),
        ("role_count", roles, len(ROLES)),
    ):
        if value != expected:
            faults.add(f"{name} is {value:,}, expected {expected}")
    _check_flags(version, flags, faults)
    for name, value, limit in (
        ("num_layers", layers, MAX_LAYERS),
        ("num_experts", experts, MAX_EXPERTS),
        ("top_k", top_k, min(experts, MAX_EXPERTS)),
    ):
        if not 1 <= value <= limit:
            faults.add(f"{name} is {value:,}, expected 1..{limit}")
    if count != layers * experts * len(ROLES):
        faults.add(
            f"index_count is {count:,}, expected {layers * experts * len(ROLES):,}"
            f" ({layers} layers x {experts} experts x {len(ROLES)})"
        )
    header = PackHeader(
        version=version,
        flags=flags,
        data_start=start,
        alignment=alignment,
        num_layers=layers,
        num_experts=experts,
        top_k=top_k,
        model_identity=identity,
        source_sha256=source,
        config_sha256=config,
    )
    _check_places(header, size, faults)
    return None if len(faults) else header


def _check_flags(version: int, flags: int, faults: FaultList) -> None:
    if flags & _REQUIRED != _REQUIRED:
        faults.add(
            f"flags are {flags:#x}, expected {_REQUIRED:#x}: unchanged bytes, an expert's matrices"
            " together"
        )
    if flags & ~_KNOWN[version]:
        unknown = flags & ~_KNOWN[version]
        faults.add(f"flags {unknown:#x} are not known: made by a newer program?")


def _check_places(header: PackHeader, size: int, faults: FaultList) -> None:
    start, alignment = header.data_start, header.alignment
    if alignment < 1 or alignment & (alignment - 1):
        faults.add(f"alignment is {alignment:,}, expected a power of two")
    elif start % alignment:
        faults.add(f"data_start is {start:,}, expected a multiple of the alignment {alignment:,}")
    if start < header.index_end:
        faults.add(f"data_start is {start:,}, inside the index, which ends at {header.index_end:,}")
    if max(start, header.index_end) > size:
        faults.add(
            f"{size:,} bytes present, header and index alone take {max(start, header.index_end):,}:"
            " truncated copy?"
        )
