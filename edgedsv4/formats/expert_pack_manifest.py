"""The manifest beside an expert pack: which file it belongs to, and what it was made from.

`X.manifest.json` of the pack `X` is written last, so a pack without one is unfinished. Its keys are
SGLang's. A pack may be moved: then the path in its manifest is not its own any more, which is said
and harmless; size, digest of the index and dims must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edgedsv4.errors import FormatError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.formats.expert_pack_header import (
    ENTRY_BYTES,
    FORMATS,
    HEADER_BYTES,
    ROLES,
    PackHeader,
)
from edgedsv4.formats.faults import FaultList, quoted
from edgedsv4.formats.strict_json import JsonValue, read_json_object

if TYPE_CHECKING:
    from edgedsv4.formats.expert_pack import ExpertPack

MANIFEST_SUFFIX: Final = ".manifest.json"
MAX_MANIFEST_BYTES: Final = 1 << 22
MAX_MANIFEST_VALUES: Final = 1 << 18
"""Some 13 per tensor of the model; keeps a hostile file below its size and 64 MiB of memory."""
_DIGEST_TEXT: Final = 64


@dataclass(frozen=True, slots=True)
class ManifestTensor:
    """A tensor of the source that stays outside the pack."""

    name: str
    shape: tuple[int, ...]
    """Row-major."""
    type_name: str
    nbytes: int
    sha256: str
    """Hex digest of its bytes."""


@dataclass(frozen=True, slots=True)
class PackManifest:
    """A manifest that was read and found whole by itself."""

    path: Path
    pack_path: Path
    """Where the pack was when it was built."""
    pack_size: int
    pack_sha256: str
    index_sha256: str
    numbers: Mapping[str, int]
    """Dims and places by the names of the header."""
    digests: Mapping[str, str]
    """`model_identity_sha256` (early packs have none), `source_sha256`, `config_sha256`."""
    format: str
    source_path: Path
    source_size: int
    dense_path: Path | None
    """A companion without the experts that was written with the pack."""
    tensors: tuple[ManifestTensor, ...]
    """What must be in the model's other file."""
    values: Mapping[str, JsonValue]
    """Everything, as read."""


def manifest_path(pack: Path) -> Path:
    """The manifest that goes with a pack."""
    return pack.with_name(pack.name + MANIFEST_SUFFIX)


def read_manifest(path: Path) -> PackManifest:
    """Read a manifest.

    Raises:
        FormatError: missing (a pack without one was never finished), not JSON, of another format,
            of an unfinished build, or without a key.
    """
    if not path.exists():
        raise FormatError(
            "no such file: an expert pack without a manifest is unfinished, or its manifest was"
            " left behind; copy it beside the pack or build again",
            path=path,
            fault="missing",
        )
    reader = _Reader(path, _values(path))
    manifest = reader.manifest()
    reader.faults.raise_if_any("the manifest of the expert pack cannot be used")
    return manifest


def _values(path: Path) -> dict[str, JsonValue]:
    return read_json_object(path, limit_bytes=MAX_MANIFEST_BYTES, limit_values=MAX_MANIFEST_VALUES)


def check_manifest(manifest: PackManifest, pack: ExpertPack) -> tuple[str, ...]:
    """Compare a manifest with its pack.

    Returns:
        Warnings.

    Raises:
        FormatError: they do not belong together.
    """
    header, layout = pack.header, pack.layout
    faults = FaultList(pack.path)
    own: list[tuple[str, object, object]] = [
        ("format", FORMATS[header.version], manifest.format),
        ("size", pack.file.size, manifest.pack_size),
        ("index_sha256", pack.index_sha256(), manifest.index_sha256),
    ]
    own += [
        (name, value, manifest.numbers.get(name)) for name, value in header_numbers(header).items()
    ]
    own += [(name, value, manifest.digests.get(name, value)) for name, value in _digests(header)]
    own.append(("payload_bytes", layout.payload_bytes, manifest.numbers.get("payload_bytes")))
    for name, found, expected in own:
        if found != expected:
            faults.add(f"{name} is {found}, its manifest says {expected}")
    faults.raise_if_any(f"it is not the pack of {manifest.path.name}", "mismatch")
    if manifest.pack_path != Path(pack.path).resolve():
        return (f"{manifest.path.name} names {manifest.pack_path}: the expert pack was moved",)
    return ()


def header_numbers(header: PackHeader) -> dict[str, int]:
    """What manifest and header both say, by the manifest's names."""
    return {
        "version": header.version,
        "alignment": header.alignment,
        "header_bytes": HEADER_BYTES,
        "index_entry_bytes": ENTRY_BYTES,
        "index_count": header.index_count,
        "data_start": header.data_start,
        "object_count": header.num_layers * header.num_experts,
        "num_layers": header.num_layers,
        "num_routed_experts": header.num_experts,
        "top_k": header.top_k,
    }


def _digests(header: PackHeader) -> list[tuple[str, str]]:
    return [
        ("model_identity_sha256", header.model_identity.hex()),
        ("source_sha256", header.source_sha256.hex()),
        ("config_sha256", header.config_sha256.hex()),
    ]


class _Reader:
    """Takes values out of a manifest; what is missing or of another type becomes a fault."""

    def __init__(self, path: Path, values: dict[str, JsonValue]) -> None:
        self.path = path
        self.faults = FaultList(path)
        self._values = values

    def manifest(self) -> PackManifest:
        self._check_head()
        model = self._object("model")
        source = self._object("source")
        numbers = {
            name: self._integer(self._values, name)
            for name in (
                *("version", "alignment", "header_bytes", "index_entry_bytes", "index_count"),
                *("data_start", "object_count", "payload_bytes"),
            )
        }
        for name in ("num_layers", "num_routed_experts", "top_k"):
            numbers[name] = self._integer(model, name)
        digests = {
            "source_sha256": self._digest(source, "sha256"),
            "config_sha256": self._digest(model, "config_sha256"),
        }
        if "ollama_manifest_sha256" not in model:
            digests["model_identity_sha256"] = self._digest(model, "model_identity_sha256")
        dense = self._values.get("dense")
        return PackManifest(
            path=self.path,
            pack_path=Path(self._text(self._values, "pack_path")),
            pack_size=self._integer(self._values, "pack_size"),
            pack_sha256=self._digest(self._values, "pack_sha256"),
            index_sha256=self._digest(self._values, "index_sha256"),
            numbers=numbers,
            digests=digests,
            format=self._text(self._values, "format"),
            source_path=Path(self._text(source, "path")),
            source_size=self._integer(source, "size"),
            dense_path=Path(self._text(dense, "path")) if isinstance(dense, dict) else None,
            tensors=self._tensors(),
            values=self._values,
        )

    def _check_head(self) -> None:
        name = self._values.get("format")
        if name not in FORMATS.values():
            expected = " or ".join(FORMATS.values())
            self.faults.add(f"format is {quoted(name)}, expected {expected}")
        if self._values.get("complete") is not True:
            self.faults.add("complete is not true: the build of the expert pack did not end")
        if self._values.get("role_order") != list(ROLES):
            found = quoted(self._values.get("role_order"))
            self.faults.add(f"role_order is {found}, expected {list(ROLES)}")

    def _tensors(self) -> tuple[ManifestTensor, ...]:
        found: list[ManifestTensor] = []
        listed = self._values.get("tensors")
        if not isinstance(listed, list):
            self.faults.add(f"tensors must be a list, found {quoted(listed)[:20]}")
            return ()
        for number, entry in enumerate(listed):
            if not isinstance(entry, dict) or entry.get("category") == "routed_expert":
                if not isinstance(entry, dict):
                    self.faults.add(f"tensors[{number}] is no object")
                continue
            found.append(
                ManifestTensor(
                    name=self._text(entry, "name"),
                    shape=self._shape(entry, number),
                    type_name=self._type(entry),
                    nbytes=self._integer(entry, "source_nbytes"),
                    sha256=self._digest(entry, "source_payload_sha256"),
                )
            )
        return tuple(found)

    def _shape(self, entry: Mapping[str, JsonValue], number: int) -> tuple[int, ...]:
        """Dims, which are written fastest first."""
        dims = entry.get("shape")
        sizes = [dim for dim in dims if type(dim) is int] if isinstance(dims, list) else []
        if not isinstance(dims, list) or len(sizes) != len(dims):
            self.faults.add(f"tensors[{number}] has the shape {quoted(dims)}, expected integers")
        return tuple(reversed(sizes))

    def _type(self, entry: Mapping[str, JsonValue]) -> str:
        name = self._text(entry, "type")
        if name not in BLOCK_TYPES:
            self.faults.add(f"tensor {quoted(entry.get('name'))} is of unknown type {quoted(name)}")
        return name

    def _object(self, name: str) -> Mapping[str, JsonValue]:
        value = self._values.get(name)
        if isinstance(value, dict):
            return value
        self.faults.add(f"{name} must be an object, found {quoted(value)}")
        return {}

    def _text(self, values: Mapping[str, JsonValue], name: str) -> str:
        value = values.get(name)
        if isinstance(value, str) and value and "\0" not in value:
            return value
        self.faults.add(f"{name} must be a text, found {quoted(value)}")
        return "?"

    def _integer(self, values: Mapping[str, JsonValue], name: str) -> int:
        value = values.get(name)
        if type(value) is int and 0 <= value < 1 << 63:
            return value
        self.faults.add(f"{name} must be an integer, 0..2^63-1, found {quoted(value)}")
        return 0

    def _digest(self, values: Mapping[str, JsonValue], name: str) -> str:
        value = values.get(name)
        is_hex = isinstance(value, str) and len(value) == _DIGEST_TEXT
        if is_hex and isinstance(value, str) and set(value) <= set("0123456789abcdef"):
            return value
        self.faults.add(f"{name} must be a SHA-256 in hex, found {quoted(value)}")
        return ""
