"""How far a build of an expert pack has come, so that it can go on after a crash.

`X.checkpoint.json` is replaced after each layer whose bytes are on the disk. It holds the digests
that must still be the same, and the index entries of every finished layer. The form is SGLang's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from edgedsv4.errors import FormatError
from edgedsv4.formats.expert_pack_header import FORMATS, PackHeader
from edgedsv4.formats.expert_pack_index import ENTRY, TEXTS, Entries, field_text, text_field
from edgedsv4.formats.faults import FaultList, quoted
from edgedsv4.formats.strict_json import JsonValue, read_json_object

CHECKPOINT_SUFFIX: Final = ".checkpoint.json"
_VERSION: Final = 1
# Most bytes and values that one entry takes, and that everything else takes.
_ENTRY_TEXT_BYTES, _ENTRY_VALUES = 2048, 40
_REST_TEXT_BYTES, _REST_VALUES = 1 << 16, 1 << 12
_DIGESTS: Final = ("source_tensor_sha256", "source_slice_sha256", "checksum")
_INDENT: Final = "    "


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildIdentity:
    """What must be the same for a build to go on."""

    header: PackHeader
    tool_sha256: str
    """Digest of the program that writes the pack."""
    expected_pack_bytes: int
    started_at: str
    """ISO 8601, UTC; of the first start, and not compared."""

    def digests(self) -> dict[str, JsonValue]:
        """Everything that is compared, by the names of the checkpoint."""
        return {
            "source_sha256": self.header.source_sha256.hex(),
            "model_identity_sha256": self.header.model_identity.hex(),
            "config_sha256": self.header.config_sha256.hex(),
            "tool_sha256": self.tool_sha256,
            "expected_pack_bytes": self.expected_pack_bytes,
        }


@dataclass(slots=True)
class BuildProgress:
    """Finished layers of a build."""

    started_at: str
    pack_end: int
    """First byte behind the last finished layer."""
    layers: list[Entries] = field(default_factory=list)
    """Index entries per finished layer."""
    texts: list[str] = field(default_factory=list)
    """The same as JSON, made once per layer."""

    def add(self, entries: Entries, pack_end: int) -> None:
        """Count one more layer as finished."""
        self.layers.append(entries)
        self.texts.append(",\n".join(_entry_text(row) for row in entries))
        self.pack_end = pack_end

    def entries(self) -> Entries:
        """The index so far."""
        return np.concatenate([np.zeros(0, dtype=ENTRY), *self.layers])


def write_json(path: Path, text: str) -> None:
    """Replace a file by another text, so that a crash leaves the one or the other.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise
    sync_folder(path.parent)


def json_text(values: Mapping[str, object]) -> str:
    """A document as side files hold it."""
    return json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def sync_folder(folder: Path) -> None:
    """Make renames durable.

    Raises:
        OSError: the folder cannot be opened or synced.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoint_text(identity: BuildIdentity, progress: BuildProgress, *, complete: bool) -> str:
    """The checkpoint as it is written."""
    values = identity.digests() | {
        "format": f"{FORMATS[identity.header.version]}-checkpoint",
        "version": _VERSION,
        "status": "complete" if complete else "in_progress",
        "started_at": progress.started_at,
        "completed_layers": list(range(len(progress.layers))),
        "pack_end": progress.pack_end,
        "entries": [],
    }
    text = json_text(values)
    if not progress.texts:
        return text
    # Entries are spliced in as made: encoding all of them again at each layer would take minutes.
    return text.replace('"entries": []', '"entries": [\n' + ",\n".join(progress.texts) + "\n  ]", 1)


def read_checkpoint(path: Path, identity: BuildIdentity) -> BuildProgress:
    """Read how far a build came.

    Raises:
        FormatError: damaged, or of a build that differs in source, configuration or program.
    """
    count = identity.header.index_count
    values = read_json_object(
        path,
        limit_bytes=_REST_TEXT_BYTES + count * _ENTRY_TEXT_BYTES,
        limit_values=_REST_VALUES + count * _ENTRY_VALUES,
    )
    faults = FaultList(path)
    wanted = identity.digests() | {
        "format": f"{FORMATS[identity.header.version]}-checkpoint",
        "version": _VERSION,
    }
    for name, expected in wanted.items():
        if values.get(name) != expected:
            faults.add(f"{name} is {quoted(values.get(name))}, this build has {quoted(expected)}")
    if values.get("status") not in ("in_progress", "complete"):
        faults.add(f"status is {quoted(values.get('status'))}")
    faults.raise_if_any(
        "it belongs to another build; delete it and the .partial file to start again", "mismatch"
    )
    try:
        return _progress(values, identity.header)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(
            f"is damaged ({error}); delete it and the .partial file to start again", path=path
        ) from error


def _progress(values: Mapping[str, JsonValue], header: PackHeader) -> BuildProgress:
    layers, listed = values["completed_layers"], values["entries"]
    end, started = values["pack_end"], values["started_at"]
    if not isinstance(layers, list) or layers != list(range(len(layers))):
        raise ValueError("completed_layers must be 0, 1, ...")
    per_layer = header.index_count // header.num_layers
    if not isinstance(listed, list) or len(listed) != per_layer * len(layers):
        raise ValueError(f"entries must be {per_layer * len(layers):,}")
    if type(end) is not int or not isinstance(started, str) or len(layers) > header.num_layers:
        raise ValueError("pack_end, started_at or completed_layers cannot be right")
    progress = BuildProgress(started, header.data_start)
    entries = np.zeros(len(listed), dtype=ENTRY)
    for at, record in enumerate(listed):
        _fill(entries[at], record)
    for layer in layers:
        first = per_layer * len(progress.layers)
        progress.add(entries[first : first + per_layer], end)
        assert len(progress.layers) == int(str(layer)) + 1
    return progress


def _fill(row: np.void, record: JsonValue) -> None:
    if not isinstance(record, dict) or record.keys() != set(ENTRY.names or ()):
        raise ValueError("an entry with other members than those of the index")
    for name, value in record.items():
        if name in TEXTS:
            value_bytes = text_field(str(value), row[name].size)
            row[name] = np.frombuffer(value_bytes, dtype=np.uint8)
        elif name in _DIGESTS:
            row[name] = np.frombuffer(bytes.fromhex(str(value)), dtype=np.uint8)
        elif isinstance(value, list):
            row[name] = [int(str(dim)) for dim in value]
        else:
            row[name] = int(str(value))


def _entry_text(row: np.void) -> str:
    record: dict[str, object] = {}
    for name in ENTRY.names or ():
        value = row[name]
        if name in TEXTS:
            record[name] = field_text(value)
        elif name in _DIGESTS:
            record[name] = value.tobytes().hex()
        else:
            record[name] = value.tolist()
    text = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False)
    return "\n".join(_INDENT + line for line in text.splitlines())
