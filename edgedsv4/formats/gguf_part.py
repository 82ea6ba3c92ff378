"""Reads one GGUF file by itself: a model, or one part of a split model.

A header is read once, front to back, by a cursor that checks every length (`gguf_values`); the
tensor table is then checked as a whole, and everything wrong with it is reported in one error.
Tensor data are not touched.

Source: the GGUF specification, version 3. Versions 2 and 3 differ only in allowing big-endian
files, which are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from edgedsv4.errors import Fault, FormatError
from edgedsv4.formats.block_types import by_ggml_id, ggml_type_problem
from edgedsv4.formats.gguf_values import (
    MAX_KEY_BYTES,
    MAX_NAME_BYTES,
    Cursor,
    GgufType,
    MetadataValue,
    shortened,
)
from edgedsv4.formats.mapped_file import MappedFile
from edgedsv4.formats.tensor_record import TensorRecord

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
SUPPORTED_VERSIONS = (2, 3)
MAX_DIMS = 4

# Smallest entry on disk (length, one character, type or dims, value); most memory its objects take.
_KEY_MIN_BYTES, _KEY_COST = 14, 400
_TENSOR_MIN_BYTES, _TENSOR_COST = 33, 1000
_NAMED_PROBLEMS = 8


@dataclass(frozen=True)
class GgufFile:
    """An opened GGUF file, or a split set read as one. Close it, or use it as a context manager."""

    path: Path
    """The file that was asked for."""
    version: int
    """Container version, 2 or 3; of the first part."""
    alignment: int
    """Bytes to whose multiples tensors are aligned; of the first part."""
    data_offset: int
    """Where the tensor data begin; of the first part."""
    metadata: Mapping[str, MetadataValue]
    """Keys in file order. Arrays of numbers are read-only NumPy views, those of strings lists."""
    value_types: Mapping[str, GgufType]
    """Type of each key's value as stored; of an array the type of its elements."""
    tensors: Mapping[str, TensorRecord]
    """All tensors by name, in file order."""
    warnings: tuple[str, ...]
    """What is odd but harmless."""
    files: tuple[MappedFile, ...]
    """The mappings, one per part."""

    def check_unchanged(self) -> None:
        """Raise `FormatError` if any part was modified, replaced or shortened while open."""
        for file in self.files:
            file.check_unchanged()

    def close(self) -> None:
        """Close every part; views handed out stay valid until they are garbage collected."""
        for file in self.files:
            file.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    """One line of the tensor table as it stands in the file."""

    at: int
    """Where the entry begins."""
    name: str
    dims: tuple[int, ...]
    """Fastest-varying dim first."""
    type_id: int
    offset: int
    """Relative to the data."""


def read_part(path: Path) -> GgufFile:
    """Open exactly one file and check it by itself, whether or not it is part of a set.

    Raises:
        FormatError: if it is missing, damaged, truncated, or of another format.
    """
    file = MappedFile.open(path)
    try:
        return _read(file)
    except BaseException:
        file.close()
        raise


def _read(file: MappedFile) -> GgufFile:
    cursor = Cursor(file)
    version = _read_version(cursor)
    tensor_count = cursor.count(_TENSOR_MIN_BYTES, "tensor count")
    key_count = cursor.count(_KEY_MIN_BYTES, "key count")
    cursor.spend(tensor_count * _TENSOR_COST, f"a table of {tensor_count:,} tensors")
    cursor.spend(key_count * _KEY_COST, f"a table of {key_count:,} keys")
    metadata, types = _read_metadata(cursor, key_count)
    alignment = _alignment(cursor, metadata, types)
    entries = _read_tensor_table(cursor, tensor_count)
    data_offset = -(-cursor.position // alignment) * alignment
    records = _check_tensors(file, entries, data_offset, alignment)
    return GgufFile(
        path=file.path,
        version=version,
        alignment=alignment,
        data_offset=data_offset,
        metadata=metadata,
        value_types=types,
        tensors={record.name: record for record in records},
        warnings=_unclaimed_bytes(file, records, data_offset, alignment),
        files=(file,),
    )


def _read_version(cursor: Cursor) -> int:
    cursor.need(4, "the GGUF magic")
    magic = cursor.file.view(0, 4).tobytes()
    if magic != MAGIC:
        cursor.fail(f"not a GGUF file: it begins with {magic!r}, expected {MAGIC!r}{_hint(magic)}")
    cursor.position = 4
    version = cursor.u32("version")
    if version not in SUPPORTED_VERSIONS:
        cursor.fail(f"GGUF version {version:,}, expected 2 or 3; {_version_advice(version)}", 4)
    return version


def _version_advice(version: int) -> str:
    if version == 1:
        return "convert the model again with a current llama.cpp"
    if version and version & 0xFFFF == 0:
        return "a big-endian file: convert it with gguf-convert-endian"
    return "damaged file?"


def _hint(magic: bytes) -> str:
    """What a file that is no GGUF probably is."""
    kinds = {
        b"vers": "; a Git LFS pointer: fetch the real file with `git lfs pull`",
        b"<!do": "; a web page: the download failed",
        b"<!DO": "; a web page: the download failed",
        b"<htm": "; a web page: the download failed",
        b"FUGG": "; a big-endian file",
        b"ggml": "; an old ggml file: convert the model again",
        b"lmgg": "; an old ggml file: convert the model again",
        b"fmgg": "; an old ggml file: convert the model again",
        b"tjgg": "; an old ggml file: convert the model again",
        b"PK\x03\x04": "; a zip archive or PyTorch checkpoint",
    }
    return kinds.get(magic, "")


def _read_metadata(
    cursor: Cursor, count: int
) -> tuple[dict[str, MetadataValue], dict[str, GgufType]]:
    values: dict[str, MetadataValue] = {}
    types: dict[str, GgufType] = {}
    for index in range(count):
        start = cursor.position
        key = cursor.label(f"name of key {index + 1} of {count}", MAX_KEY_BYTES)
        if key in values:
            cursor.fail(f"key {shortened(key)!r} occurs twice", start)
        values[key], types[key] = cursor.value(key)
    return values, types


def _alignment(
    cursor: Cursor, metadata: Mapping[str, MetadataValue], types: Mapping[str, GgufType]
) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    kind = types.get("general.alignment", GgufType.U32)
    if kind is not GgufType.U32 or not isinstance(value, int):
        cursor.fail(f"general.alignment is {_describe(value, kind)}, expected one U32")
    if value & (value - 1) or not 1 <= value <= MAX_ALIGNMENT:
        cursor.fail(f"general.alignment is {value}, expected a power of two, 1..{MAX_ALIGNMENT:,}")
    return value


def _describe(value: MetadataValue, kind: GgufType) -> str:
    if isinstance(value, (int, float, str)):
        return f"a {kind.name}"
    return f"an array of {kind.name}"


def _read_tensor_table(cursor: Cursor, count: int) -> list[_TensorEntry]:
    entries: list[_TensorEntry] = []
    names: set[str] = set()
    for index in range(count):
        at = cursor.position
        name = cursor.label(f"name of tensor {index + 1} of {count}", MAX_NAME_BYTES)
        if name in names:
            cursor.fail(f"tensor {name!r} occurs twice", at)
        names.add(name)
        dims_at = cursor.position
        n_dims = cursor.u32(f"number of dims of tensor {name}")
        if not 1 <= n_dims <= MAX_DIMS:
            cursor.fail(f"tensor {name} has {n_dims:,} dims, expected 1..{MAX_DIMS}", dims_at)
        dims = tuple(cursor.u64(f"dims of tensor {name}") for _ in range(n_dims))
        type_id = cursor.u32(f"type of tensor {name}")
        offset = cursor.u64(f"offset of tensor {name}")
        entries.append(_TensorEntry(at, name, dims, type_id, offset))
    return entries


def _check_tensors(
    file: MappedFile, entries: list[_TensorEntry], data_offset: int, alignment: int
) -> list[TensorRecord]:
    """Turn the table into records, or report everything that is wrong with it at once."""
    faults: list[tuple[int, str]] = []
    records: list[TensorRecord] = []
    for entry in entries:
        problem = _entry_problem(entry, alignment)
        if problem is None:
            records.append(_record(file, entry, data_offset))
        else:
            faults.append((entry.at, f"tensor {entry.name} {problem}"))
    if faults:
        _raise_faults(file, faults)
    places = {entry.name: entry.at for entry in entries}
    overlaps, cut = _overlap_faults(records, places), _cut_faults(file, records, places)
    if overlaps or cut:
        _raise_faults(file, [*overlaps, *cut], "format" if overlaps else "truncated")
    return records


def _entry_problem(entry: _TensorEntry, alignment: int) -> str | None:
    elements = 1
    for dim in entry.dims:
        if not 0 < dim < 1 << 63:
            return f"has a dim of {dim:,}, expected 1..2^63-1"
        elements *= dim
    if elements >= 1 << 63:
        return f"has {elements:,} elements ({_shape(entry)}), more than 2^63-1"
    block_type = by_ggml_id(entry.type_id)
    type_problem = ggml_type_problem(entry.type_id)
    if block_type is None or type_problem is not None:
        return (
            f"has {type_problem}; community files with a custom FP8 type end here too:"
            " take an MXFP4 or Q8_0 file of the model"
        )
    if entry.dims[0] % block_type.block_elements:
        return (
            f"has rows of {entry.dims[0]:,} elements, {block_type.name} needs a multiple of"
            f" {block_type.block_elements}"
        )
    if entry.offset % alignment:
        return f"begins at {entry.offset:,}, not a multiple of the alignment {alignment:,}"
    return None


def _shape(entry: _TensorEntry) -> str:
    return " x ".join(str(dim) for dim in reversed(entry.dims))


def _record(file: MappedFile, entry: _TensorEntry, data_offset: int) -> TensorRecord:
    block_type = by_ggml_id(entry.type_id)
    assert block_type is not None  # `_entry_problem` refused the entry otherwise
    rows = 1
    for dim in entry.dims[1:]:
        rows *= dim
    return TensorRecord(
        name=entry.name,
        shape=tuple(reversed(entry.dims)),
        block_type=block_type,
        nbytes=rows * block_type.row_bytes(entry.dims[0]),
        offset=data_offset + entry.offset,
        file=file,
    )


def _overlap_faults(
    records: list[TensorRecord], places: Mapping[str, int]
) -> list[tuple[int, str]]:
    """Tensors that overlap another one."""
    faults: list[tuple[int, str]] = []
    ordered = sorted(records, key=lambda record: record.offset)
    furthest: TensorRecord | None = None
    for record in ordered:
        if furthest is not None and record.offset < furthest.offset + furthest.nbytes:
            text = f"tensor {record.name} overlaps tensor {furthest.name}"
            faults.append((places[record.name], text))
        if furthest is None or furthest.offset + furthest.nbytes < record.offset + record.nbytes:
            furthest = record
    return faults


def _cut_faults(
    file: MappedFile, records: list[TensorRecord], places: Mapping[str, int]
) -> list[tuple[int, str]]:
    """One fault, when tensors lie past the end of the file."""
    past = [record for record in records if record.offset + record.nbytes > file.size]
    if not past:
        return []
    first = min(past, key=lambda record: record.offset)
    needed = max(record.offset + record.nbytes for record in past)
    text = (
        f"{file.size:,} of {needed:,} bytes present: truncated download?"
        f" Tensor {first.name} is the first that lies past the end"
    )
    return [(places[first.name], text)]


def _raise_faults(file: MappedFile, faults: list[tuple[int, str]], fault: Fault = "format") -> None:
    shown = "; ".join(text for _, text in faults[:_NAMED_PROBLEMS])
    rest = len(faults) - _NAMED_PROBLEMS
    raise FormatError(
        f"{shown}; and {rest:,} more" if rest > 0 else shown,
        path=file.path,
        offset=faults[0][0],
        problems=tuple(text for _, text in faults),
        fault=fault,
    )


def _unclaimed_bytes(
    file: MappedFile, records: list[TensorRecord], data_offset: int, alignment: int
) -> tuple[str, ...]:
    """A warning when bytes follow the last tensor that are more than its padding."""
    end = max((record.offset + record.nbytes for record in records), default=data_offset)
    padded = -(-end // alignment) * alignment
    if file.size <= padded:
        return ()
    return (f"{file.path}: {file.size - padded:,} bytes after the last tensor belong to nothing",)
