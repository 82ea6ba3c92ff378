"""Where every matrix of a pack lies, computed from the sizes alone.

An expert's three matrices are one object: gate, up, down, then padding. Version 1 puts them back to
back; version 2 begins each at a multiple of 64 bytes. Objects follow each other by layer, then by
expert, at a distance that is one for a whole layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from edgedsv4.formats.expert_pack_header import (
    ENTRY_BYTES,
    HEADER_BYTES,
    LAYER_STRIDE_VARIES,
    ROLE_SIZES_VARY,
    ROLES,
)

RoleSizes = tuple[int, int, int]
"""Bytes of gate, up and down."""

_ROLE_ALIGNMENT: Final = {1: 1, 2: 64}


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The experts of one layer."""

    start: int
    """First byte of expert 0, absolute."""
    stride: int
    """Bytes from one expert to the next."""
    role_offsets: RoleSizes
    """First byte of each matrix, from the start of its expert."""
    role_nbytes: RoleSizes

    @property
    def payload_bytes(self) -> int:
        """Bytes of one expert without padding."""
        return sum(self.role_nbytes)

    def place(self, expert: int, role: int) -> tuple[int, int]:
        """(first byte, bytes) of one matrix."""
        offset = self.start + expert * self.stride + self.role_offsets[role]
        return offset, self.role_nbytes[role]


@dataclass(frozen=True, slots=True)
class PackLayout:
    """All layers of a pack."""

    layers: tuple[LayerLayout, ...]
    num_experts: int
    data_start: int
    data_end: int
    """First byte behind the last object."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of all experts without padding."""
        return self.num_experts * sum(layer.payload_bytes for layer in self.layers)

    @property
    def padding_bytes(self) -> int:
        """Bytes between experts that belong to none."""
        return self.data_end - self.data_start - self.payload_bytes

    @property
    def flags(self) -> int:
        """Flags of version 2 that follow from the sizes."""
        is_mixed = any(len(set(layer.role_nbytes)) > 1 for layer in self.layers)
        strides = {layer.stride for layer in self.layers}
        return ROLE_SIZES_VARY * is_mixed | LAYER_STRIDE_VARIES * (len(strides) > 1)


def aligned(nbytes: int, alignment: int) -> int:
    """The next multiple of `alignment`."""
    return nbytes + -nbytes % alignment


def least_data_start(num_layers: int, num_experts: int, alignment: int) -> int:
    """Where data begin when nothing is left free behind the index."""
    count = num_layers * num_experts * len(ROLES)
    return aligned(HEADER_BYTES + count * ENTRY_BYTES, alignment)


def lay_out(
    sizes: Sequence[RoleSizes], num_experts: int, *, version: int, data_start: int, alignment: int
) -> PackLayout:
    """Place every layer.

    Args:
        sizes: bytes of the matrices, per layer.
        num_experts: experts per layer.
        version: 1 or 2.
        data_start: first byte of the first expert.
        alignment: of every expert.
    """
    role_alignment = _ROLE_ALIGNMENT[version]
    layers: list[LayerLayout] = []
    at = data_start
    for gate, up, down in sizes:
        up_at = aligned(gate, role_alignment)
        down_at = aligned(up_at + up, role_alignment)
        stride = aligned(down_at + down, alignment)
        layers.append(LayerLayout(at, stride, (0, up_at, down_at), (gate, up, down)))
        at += num_experts * stride
    return PackLayout(tuple(layers), num_experts, data_start, at)
