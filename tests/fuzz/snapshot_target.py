"""What is fuzzed: the reader of saved sessions, which may raise nothing but `SnapshotError`.

The first byte of an input says what the rest is: 0 a whole file; 1 a JSON header, which is given a
right checksum and the sections that its table asks for; 2 the section of turns.
"""

from __future__ import annotations

import hashlib
import json
import struct

from edgedsv4.errors import SnapshotError
from edgedsv4.formats.snapshot_file import MAGIC, Meter, SnapshotInfo, open_snapshot
from edgedsv4.formats.snapshot_header import SECTIONS
from edgedsv4.formats.snapshot_turns import decode_turns, encode_turns

VOCAB_SIZE = 5
_MOST_BYTES = 1 << 16


def run(data: bytes) -> bool:
    """Read one input; true if it was accepted. Anything but `SnapshotError` passes through."""
    kind, rest = data[:1], data[1:]
    try:
        if kind == b"\2":
            _check_turns(rest)
        else:
            _check_file(_signed(rest) if kind == b"\1" else rest)
    except SnapshotError:
        return False
    return True


def _check_file(data: bytes) -> None:
    with open_snapshot(data) as snapshot:
        _check_info(snapshot.info, len(data))
        read = [snapshot.section(name, Meter(1)).rest() for name in SECTIONS]
    # What an accepted file promises: its sections are as large as its counts say.
    sizes = snapshot.info.header.section_bytes()
    for name, section in zip(SECTIONS, read, strict=True):
        if name in sizes and section.size != sizes[name]:
            raise RuntimeError(f"{name} has {section.size} bytes, not {sizes[name]}")


def _check_info(info: SnapshotInfo, nbytes: int) -> None:
    last = info.sections[-1]
    if last.offset + last.nbytes != nbytes:
        raise RuntimeError(f"{last.name} ends at {last.offset + last.nbytes}, not {nbytes}")
    json.dumps(info.to_json())
    for ring, first in zip(info.layout.rings(), info.header.rings, strict=True):
        if not 0 <= info.length - first <= ring.slots:
            raise RuntimeError(f"a ring of {ring.slots} holds {first}..{info.length}")


def _check_turns(data: bytes) -> None:
    turns = decode_turns(data, vocab_size=VOCAB_SIZE, path=None, offset=0)
    if encode_turns(turns) != data:
        raise RuntimeError("turns were not read as they are written")


def _signed(text: bytes) -> bytes:
    """A file with this header and zeros for sections, as long as its table says and within 64 KiB.

    The checksums of the table are left: those of the corpus are of zeros.
    """
    try:
        size = sum(entry[1] for entry in json.loads(text)["sections"])
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        size = 0
    body = bytes(min(max(0, size), _MOST_BYTES)) if isinstance(size, int) else b""
    fixed = struct.pack("<8sIIQQ", MAGIC, 1, 0x0A0B0C0D, len(text), 64 + len(text) + len(body))
    return fixed + hashlib.sha256(fixed + text).digest() + text + body
