"""What is fuzzed: the safetensors readers, which may raise nothing but `FormatError`.

The first byte of an input says what the rest is: 0 a weight file, else the index of a directory.
"""

from __future__ import annotations

from pathlib import Path

from edgedsv4.errors import FormatError
from edgedsv4.formats.safetensors import (
    INDEX_NAME,
    SafetensorsFile,
    read_safetensors,
    read_safetensors_index,
)

SHARD = b'\x40\0\0\0\0\0\0\0{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}           x'


class Target:
    """Feeds inputs to the readers through files of a scratch directory."""

    def __init__(self, scratch: Path) -> None:
        self._file = scratch / "input.safetensors"
        self._directory = scratch / "checkpoint"
        self._directory.mkdir()
        (self._directory / "a.safetensors").write_bytes(SHARD)

    def run(self, data: bytes) -> bool:
        """Read one input; true if it was accepted. Anything but `FormatError` passes through."""
        try:
            with self._open(data) as opened:
                check_records(opened)
        except FormatError:
            return False
        return True

    def _open(self, data: bytes) -> SafetensorsFile:
        if data[:1] in (b"", b"\0"):
            self._file.write_bytes(data[1:])
            return read_safetensors(self._file)
        (self._directory / INDEX_NAME).write_bytes(data[1:])
        return read_safetensors_index(self._directory)


def check_records(opened: SafetensorsFile) -> None:
    """What an accepted file promises: all tensors are there, and every byte has an owner."""
    total = 0
    for record in opened.tensors.values():
        if record.data().size != record.nbytes:
            raise RuntimeError(f"{record.name} has {record.data().size} bytes")
        total += record.nbytes
    file = opened.files[0]
    header = 8 + int.from_bytes(file.view(0, 8).tobytes(), "little")
    if total != file.size - header:
        raise RuntimeError(f"{total} bytes of {file.size - header} have an owner")
