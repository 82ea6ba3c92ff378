"""Digests of a pack's source, taken in one pass and kept as `X.inventory.jsonl`.

One line tells of the source, one of each tensor, one closes the list. A build that goes on after a
crash takes them from there instead of reading the source again; every byte that enters the pack is
hashed on its way all the same and compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edgedsv4.errors import FormatError
from edgedsv4.formats.expert_pack_resume import write_json
from edgedsv4.formats.faults import quoted
from edgedsv4.formats.strict_json import JsonValue, parse_json_object

if TYPE_CHECKING:
    from edgedsv4.formats.mapped_file import MappedFile
    from edgedsv4.formats.tensor_record import TensorRecord

INVENTORY_SUFFIX: Final = ".inventory.jsonl"
_MAX_INVENTORY_BYTES: Final = 1 << 24
_MAX_LINE_BYTES: Final = 1 << 16
_PIECE_BYTES: Final = 1 << 24

OnBytes = Callable[[int], None]
"""Told the bytes of every piece that was hashed; what it raises ends the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """What is known of a source besides its tensors."""

    path: Path
    size: int
    """Bytes of all files."""
    data_offset: int
    """Where tensor data begin; 0 where several files have several."""
    alignment: int
    metadata_count: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """Digests of one source."""

    facts: SourceFacts
    sha256: bytes
    """Of the file; of several files, of their digests and names."""
    files: tuple[tuple[str, int, str], ...]
    """(name, size, hex digest) of each file, where there are several."""
    tensors: dict[str, str]
    """Tensor name -> hex digest of its bytes."""
    is_stored: bool = False
    """Taken from a file, so that the source may have changed since."""


def take_inventory(
    facts: SourceFacts, files: Sequence[MappedFile], records: Iterable[TensorRecord], told: OnBytes
) -> Inventory:
    """Read a source once and hash its files and its tensors.

    Raises:
        FormatError: a file changed meanwhile.
    """
    own: dict[MappedFile, list[TensorRecord]] = {file: [] for file in files}
    for record in records:
        own[record.file].append(record)
    tensors: dict[str, str] = {}
    digests: list[str] = []
    # Both digests of a piece at once: hashing is what takes the time, and lets other threads run.
    with ThreadPoolExecutor(1) as other:
        for file in files:
            digests.append(_hash_file(file, own[file], tensors, (other, told)))
            file.check_unchanged()
    if len(files) == 1:
        return Inventory(facts, bytes.fromhex(digests[0]), (), tensors)
    parts = tuple(
        (file.path.name, file.size, digest) for file, digest in zip(files, digests, strict=True)
    )
    text = "".join(f"{digest}  {name}\n" for name, _, digest in parts)
    return Inventory(facts, hashlib.sha256(text.encode("utf-8")).digest(), parts, tensors)


def _hash_file(
    file: MappedFile,
    records: list[TensorRecord],
    tensors: dict[str, str],
    means: tuple[ThreadPoolExecutor, OnBytes],
) -> str:
    """Digest of one file; those of its tensors are added to `tensors`."""
    whole = hashlib.sha256()
    at = 0
    other, told = means

    def take(stop: int, own: hashlib._Hash | None = None) -> None:
        nonlocal at
        while at < stop:
            piece = file.view(at, min(_PIECE_BYTES, stop - at))
            done = other.submit(whole.update, piece.data)
            if own is not None:
                own.update(piece.data)
            done.result()
            at += piece.nbytes
            told(piece.nbytes)

    for record in sorted(records, key=lambda record: record.offset):
        take(record.offset)
        own = hashlib.sha256()
        take(record.offset + record.nbytes, own)
        tensors[record.name] = own.hexdigest()
    take(file.size)
    return whole.hexdigest()


def tensor_rows(records: Iterable[TensorRecord], digests: dict[str, str]) -> list[str]:
    """The lines of the tensors, without line ends."""
    return [
        json.dumps(
            {
                "kind": "tensor",
                "name": record.name,
                "shape": list(reversed(record.shape)),
                "type": record.block_type.name,
                "type_id": record.block_type.ggml_id,
                "offset": record.offset,
                "nbytes": record.nbytes,
                "sha256": digests[record.name],
            },
            sort_keys=True,
        )
        for record in records
    ]


def rows_sha256(rows: Iterable[str]) -> str:
    """The digest by which a manifest knows an inventory."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row}\n".encode())
    return digest.hexdigest()


def write_inventory(path: Path, inventory: Inventory, rows: Sequence[str]) -> None:
    """Write an inventory.

    Raises:
        OSError: it cannot be written.
    """
    facts = inventory.facts
    source: dict[str, object] = {
        "kind": "source",
        "path": str(facts.path),
        "size": facts.size,
        "source_sha256": inventory.sha256.hex(),
        "gguf_data_offset": facts.data_offset,
        "gguf_alignment": facts.alignment,
        "tensor_count": len(rows),
        "metadata_count": facts.metadata_count,
        "payload_hashes": True,
    }
    if inventory.files:
        source["files"] = [list(part) for part in inventory.files]
    summary = {
        "kind": "summary",
        "tensor_count": len(rows),
        "inventory_sha256": rows_sha256(rows),
    }
    lines = [json.dumps(source, sort_keys=True), *rows, json.dumps(summary, sort_keys=True)]
    write_json(path, "".join(f"{line}\n" for line in lines))


def read_inventory(path: Path, facts: SourceFacts) -> Inventory:
    """Read an inventory of a source.

    Args:
        path: the file.
        facts: of the source that is open; path and size must agree.

    Raises:
        FormatError: missing, damaged, of another source, or without digests.
    """
    if not path.is_file():
        raise FormatError("no such file", path=path, fault="missing")
    if path.stat().st_size > _MAX_INVENTORY_BYTES:
        raise FormatError(f"more than {_MAX_INVENTORY_BYTES:,} bytes", path=path)
    rows: list[str] = []
    by_kind: dict[str, dict[str, JsonValue]] = {}
    tensors: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8") as file:
            while line := file.readline(_MAX_LINE_BYTES):
                record = parse_json_object(line.encode("utf-8"))
                kind = str(record.get("kind"))
                if kind == "tensor":
                    rows.append(line.rstrip("\n"))
                    tensors[str(record["name"])] = str(record["sha256"])
                else:
                    by_kind[kind] = record
        source, summary = by_kind["source"], by_kind["summary"]
        if summary.get("inventory_sha256") != rows_sha256(rows):
            raise ValueError("its tensors do not have the digest of its last line")
        return _checked(facts, source, tensors)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise FormatError(f"is no inventory of {facts.path}: {error}", path=path) from error


def _checked(
    facts: SourceFacts, source: dict[str, JsonValue], tensors: dict[str, str]
) -> Inventory:
    for name, expected in (
        ("path", str(facts.path)),
        ("size", facts.size),
        ("payload_hashes", True),
        ("tensor_count", len(tensors)),
    ):
        if source.get(name) != expected:
            raise ValueError(f"{name} is {quoted(source.get(name))}, expected {quoted(expected)}")
    listed = source.get("files", [])
    parts: list[tuple[str, int, str]] = []
    for part in listed if isinstance(listed, list) else []:
        if not isinstance(part, list) or [type(value) for value in part] != [str, int, str]:
            raise ValueError("files must be lists of name, size and digest")
        parts.append((str(part[0]), int(str(part[1])), str(part[2])))
    sha256 = bytes.fromhex(str(source["source_sha256"]))
    if len(sha256) != hashlib.sha256().digest_size:
        raise ValueError("source_sha256 is no SHA-256")
    return Inventory(facts, sha256, tuple(parts), tensors, is_stored=True)
