"""A small snapshot made by hand, and snapshots that lie with right checksums."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from edgedsv4.formats.snapshot_file import MAGIC, Meter, Source, open_snapshot
from edgedsv4.formats.snapshot_header import (
    SECTIONS,
    CheckpointRecord,
    LayerStores,
    SnapshotHeader,
    SnapshotLayout,
    SnapshotModel,
)
from edgedsv4.formats.snapshot_turns import encode_turns
from edgedsv4.formats.snapshot_write import write_snapshot

PREAMBLE = 64
TURNS = [((("", True), ("héllo", False)), (4, 2)), ((("x", False),), ())]
LAYOUT = SnapshotLayout(
    profile="default",
    dtype="f32",
    vocab_size=5,
    window=2,
    spare=3,
    row_bytes=(3, 1),
    key_bytes=(2, 1),
    stream_bytes=4,
    layers=(LayerStores(0, 0, 0, 0), LayerStores(4, 2, 8, 4), LayerStores(128, 1, 4, 0)),
)
HEADER = SnapshotHeader(
    writer="a test",
    backend="native",
    model=SnapshotModel(
        name="tiny",
        architecture="deepseek4",
        identity_sha256="ab" * 32,
        weights_sha256="cd" * 32,
        tokenizer_sha256=None,
        variant="v4",
    ),
    layout=LAYOUT,
    tokens=9,
    capacity=20,
    totals=(9, 0, 2),
    has_logits=True,
    rings=(4, 8, 4, 3, 4, 0),
    streams_first=7,
    checkpoints=(
        CheckpointRecord(position=5, has_logits=True, has_streams=False, rings=(4, 3, 4, 0, 0, 0)),
    ),
)


def sample() -> bytes:
    """A sound snapshot of about 2 KB with something in every section."""
    turns = np.frombuffer(encode_turns(TURNS), dtype=np.uint8)
    sizes = HEADER.section_bytes() | {"turns": turns.size, "note": 3}
    sections = {name: [np.arange(size, dtype=np.uint8)] for name, size in sizes.items()}
    sections["token_ids"] = [np.arange(9, dtype="<i4").view(np.uint8) % 5]
    sections["logits"] = [np.ones(5, dtype="<f4").view(np.uint8)]
    sections["turns"] = [turns]
    file = io.BytesIO()
    write_snapshot(file, HEADER, sections)
    return file.getvalue()


def read_all(source: Source) -> list[str]:
    """Every section, checksums compared; their names."""
    with open_snapshot(source) as snapshot:
        meter = Meter(1)
        for name in SECTIONS:
            snapshot.section(name, meter).skip()
        return [section.name for section in snapshot.info.sections]


def header_of(data: bytes) -> dict[str, Any]:
    """The JSON header."""
    size = int.from_bytes(data[16:24], "little")
    header: dict[str, Any] = json.loads(data[PREAMBLE : PREAMBLE + size])
    return header


def body_of(data: bytes) -> bytes:
    """All sections."""
    return data[PREAMBLE + int.from_bytes(data[16:24], "little") :]


def signed(text: bytes, body: bytes) -> bytes:
    """A snapshot with this header, whose checksum is right."""
    fixed = struct.pack("<8sIIQQ", MAGIC, 1, 0x0A0B0C0D, len(text), 64 + len(text) + len(body))
    return fixed + hashlib.sha256(fixed + text).digest() + text + body


def edited(data: bytes, edit: Callable[[dict[str, Any]], object]) -> bytes:
    """The snapshot after an edit of its header, with a right checksum of it."""
    header = header_of(data)
    edit(header)
    return signed(json.dumps(header).encode(), body_of(data))


def with_section(data: bytes, name: str, content: bytes) -> bytes:
    """The snapshot with another content of one section, all checksums right."""
    header, body = header_of(data), body_of(data)
    parts, place = [], 0
    for entry in header["sections"]:
        part = body[place : place + entry[1]]
        place += entry[1]
        if entry[0] == name:
            part = content
            entry[1:] = [len(part), hashlib.sha256(part).hexdigest()]
        parts.append(part)
    return signed(json.dumps(header).encode(), b"".join(parts))


def section_of(data: bytes, name: str) -> bytes:
    """The content of one section."""
    body, place = body_of(data), 0
    for entry in header_of(data)["sections"]:
        if entry[0] == name:
            return body[place : place + entry[1]]
        place += entry[1]
    raise KeyError(name)


def offsets(data: bytes) -> dict[str, int]:
    """Where each section begins in the file."""
    place = len(data) - len(body_of(data))
    found = {}
    for name, size, _ in header_of(data)["sections"]:
        found[name] = place
        place += size
    return found
