"""Small expert packs of any layout, and the ways to damage one."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.formats.expert_pack_header import (
    ENTRY_BYTES,
    HEADER_BYTES,
    PackHeader,
    generation,
    model_identity,
)
from edgedsv4.formats.expert_pack_index import ENTRY, PackShape, make_entry
from edgedsv4.formats.expert_pack_layout import PackLayout, lay_out, least_data_start
from edgedsv4.formats.expert_pack_trailer import ExpertFrequency, trailer_bytes

MXFP4 = ("MXFP4", "MXFP4", "MXFP4")
SOURCE = hashlib.sha256(b"source").digest()
CONFIG = hashlib.sha256(b"config").digest()

HEADER_FIELDS = {
    "version": (24, "<I"),
    "header_bytes": (28, "<I"),
    "entry_bytes": (32, "<I"),
    "flags": (36, "<I"),
    "index_count": (40, "<Q"),
    "data_start": (48, "<Q"),
    "alignment": (56, "<Q"),
    "num_layers": (64, "<I"),
    "num_experts": (68, "<I"),
    "top_k": (72, "<I"),
    "role_count": (76, "<I"),
}


@dataclass
class SmallPack:
    """A valid pack in memory."""

    version: int = 1
    types: list[tuple[str, str, str]] = field(default_factory=lambda: [MXFP4, MXFP4])
    """Per layer."""
    experts: int = 3
    hidden: int = 64
    width: int = 32
    top_k: int = 2
    alignment: int = 512
    frequency: ExpertFrequency | None = None
    seed: int = 1

    @property
    def shape(self) -> PackShape:
        rows = [tuple(BLOCK_TYPES[name] for name in names) for names in self.types]
        return PackShape(self.hidden, self.width, tuple(rows))  # type: ignore[arg-type]

    def layout(self) -> PackLayout:
        start = least_data_start(len(self.types), self.experts, self.alignment)
        return lay_out(
            self.shape.sizes(),
            self.experts,
            version=self.version,
            data_start=start,
            alignment=self.alignment,
        )

    def header(self) -> PackHeader:
        layout = self.layout()
        return PackHeader(
            version=self.version,
            flags=3 | layout.flags,
            data_start=layout.data_start,
            alignment=self.alignment,
            num_layers=len(self.types),
            num_experts=self.experts,
            top_k=self.top_k,
            model_identity=model_identity(SOURCE, CONFIG),
            source_sha256=SOURCE,
            config_sha256=CONFIG,
        )

    def content(self) -> bytearray:
        """The bytes of the file."""
        draw = np.random.default_rng(self.seed)
        layout, header, shape = self.layout(), self.header(), self.shape
        data = bytearray(layout.data_end)
        data[:HEADER_BYTES] = header.encode()
        at = HEADER_BYTES
        for layer in range(len(self.types)):
            for expert in range(self.experts):
                number = generation(header.model_identity, SOURCE, layer, expert)
                for role, name in enumerate(("gate", "up", "down")):
                    offset, nbytes = layout.layers[layer].place(expert, role)
                    payload = draw.integers(0, 120, nbytes, dtype=np.uint8).tobytes()
                    data[offset : offset + nbytes] = payload
                    digest = hashlib.sha256(payload).digest()
                    entry = make_entry(
                        (layer, expert, role),
                        BLOCK_TYPES[self.types[layer][role]],
                        shape.dims(role),
                        (f"blk.{layer}.ffn_{name}_exps.weight", "identity-v1"),
                        {
                            "source_tensor_offset": 4096,
                            "source_tensor_nbytes": nbytes * self.experts,
                            "source_slice_offset": 4096 + expert * nbytes,
                            "source_slice_nbytes": nbytes,
                            "pack_offset": offset,
                            "pack_nbytes": nbytes,
                            "generation": number,
                        },
                        {
                            "source_tensor_sha256": SOURCE,
                            "source_slice_sha256": digest,
                            "checksum": digest,
                        },
                    )
                    data[at : at + ENTRY_BYTES] = entry.tobytes()
                    at += ENTRY_BYTES
        if self.frequency is not None:
            data += trailer_bytes(self.frequency)
        return data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.content())
        return path


def mixed_pack() -> SmallPack:
    """Version 2: sizes differ by role and by layer, and frequencies follow."""
    counts = np.arange(6, dtype=np.uint64).reshape(2, 3)
    return SmallPack(
        version=2,
        types=[("IQ2_XXS", "IQ2_XXS", "Q2_K"), ("Q4_K", "Q4_K", "Q4_K")],
        hidden=256,
        width=256,
        frequency=ExpertFrequency(100, counts),
    )


def set_header(content: bytearray, name: str, value: int) -> None:
    """Overwrite a number of the header."""
    offset, form = HEADER_FIELDS[name]
    struct.pack_into(form, content, offset, value)


def entry_place(name: str, entry: int) -> tuple[int, int]:
    """(offset, bytes) of a field of an entry."""
    kind, offset = (ENTRY.fields or {})[name][:2]
    return HEADER_BYTES + entry * ENTRY_BYTES + offset, kind.itemsize


def set_entry(content: bytearray, name: str, entry: int, value: int | bytes) -> None:
    """Overwrite a field of an entry; texts and digests from their start."""
    offset, nbytes = entry_place(name, entry)
    data = value.to_bytes(nbytes, "little") if isinstance(value, int) else value
    content[offset : offset + len(data)] = data
