"""Writing a saved session: from front to back, and as a file whole or not at all.

The section table stands before the sections and holds their checksums, so all bytes are read twice:
they are in memory anyway, and the file needs no `seek` (it may be a pipe or a socket).
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edgedsv4.errors import StorageError
from edgedsv4.formats.snapshot_file import (
    BYTE_ORDER,
    FIXED,
    MAGIC,
    PREAMBLE_BYTES,
    VERSION,
    Bytes,
    Meter,
    checked_name,
    storage_error,
)
from edgedsv4.formats.snapshot_header import (
    FREE_SECTIONS,
    SECTIONS,
    SnapshotHeader,
    encode_header,
)
from edgedsv4.formats.whole_file import whole_file

if TYPE_CHECKING:
    from typing import BinaryIO

_AS_IT_WAS: Final = "; a file of that name is as it was"


def save_file(path: str | os.PathLike[str], write: Callable[[BinaryIO], None]) -> None:
    """Let `write` fill a file that takes its name only when it is complete and on the disk.

    Raises:
        ConfigError: `path` names something else than a file.
        StorageError: it cannot be written; an older file of that name is as it was.
    """
    name = checked_name(path)
    try:
        with whole_file(Path(name)) as file:
            write(file)
    except StorageError as error:
        raise StorageError(f"{error.what}{_AS_IT_WAS}", path=name, errno=error.errno) from error
    except OSError as error:
        raise storage_error(
            f"cannot be written: {error.strerror}{_AS_IT_WAS}", name, error
        ) from error


def write_snapshot(
    file: BinaryIO,
    header: SnapshotHeader,
    sections: Mapping[str, Sequence[Bytes]],
    *,
    on_progress: Callable[[int, int], None] | None = None,
    check: Callable[[], None] | None = None,
) -> None:
    """Write a snapshot from front to back; the file needs no `seek`.

    Args:
        file: anything with `write`.
        header: says what the sections hold.
        sections: uint8 [n] blocks of every section, which nobody changes meanwhile.
        on_progress: told (done, total) in bytes, each counted once for its checksum and once for
            writing.
        check: called every few megabytes; may raise to stop.

    Raises:
        StorageError: the file could not be written.
    """
    blocks = {name: [block.data for block in sections[name]] for name in SECTIONS}
    sizes = {name: sum(map(len, blocks[name])) for name in SECTIONS}
    expected = header.section_bytes()
    expected |= {name: min(sizes[name], most) for name, most in FREE_SECTIONS.items()}
    if sizes != expected:
        raise RuntimeError(f"sections have {sizes} bytes, the header says {expected}")
    meter = Meter(2 * sum(sizes.values()), on_progress, check)
    table = []
    for name in SECTIONS:
        digest = hashlib.sha256()
        for block in blocks[name]:
            for piece in meter.pieces(block):
                digest.update(piece)
        table.append((name, sizes[name], digest.hexdigest()))
    text = encode_header(header, table)
    total = PREAMBLE_BYTES + len(text) + sum(sizes.values())
    fixed = FIXED.pack(MAGIC, VERSION, BYTE_ORDER, len(text), total)
    _write_all(file, memoryview(fixed + hashlib.sha256(fixed + text).digest() + text))
    for name in SECTIONS:
        for block in blocks[name]:
            for piece in meter.pieces(block):
                _write_all(file, piece)


def _write_all(file: BinaryIO, data: memoryview) -> None:
    """Write all of it, also to a raw file that takes less than it is given."""
    while data:
        try:
            count = file.write(data)
        except OSError as error:
            raise storage_error(f"cannot be written: {error.strerror}", None, error) from error
        if not count:
            raise StorageError("the file takes no more bytes", errno=errno.EAGAIN)
        data = data[count:]
