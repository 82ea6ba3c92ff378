"""safetensors files: the header is checked whole, tensor data stay in the mapping.

Layout: u64 header length, a JSON object, then the tensors' bytes without a gap:

    {"name": {"dtype": "F8_E4M3", "shape": [4096, 1024], "data_offsets": [begin, end]}, ...}

Offsets count from the end of the header. The bytes of all tensors together must be exactly the rest
of the file, so no byte has two meanings and none is hidden.

Source: the safetensors format description.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from edgedsv4.errors import Fault, FormatError
from edgedsv4.formats.block_types import BLOCK_TYPES, BlockType
from edgedsv4.formats.faults import FaultList, quoted
from edgedsv4.formats.json_scan import JsonScanner
from edgedsv4.formats.mapped_file import MappedFile
from edgedsv4.formats.tensor_record import TensorRecord

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
MAX_ENTRY_BYTES = 1024
MAX_METADATA_BYTES = 1 << 23
MAX_INDEX_NAMES = 200_000
# A record costs about 512 bytes of memory: those that small files declare are bounded by number,
# others by the size of their file.
FREE_RECORDS = 1 << 16
RECORD_BYTES = 512

_PREFIX_BYTES = 8
_OWN_NAMES = {
    "F8_E4M3": "FP8_E4M3",
    "F8_E5M2": "FP8_E5M2",
    "F8_E4M3FNUZ": "FP8_E4M3FNUZ",
    "F8_E5M2FNUZ": "FP8_E5M2FNUZ",
    "F8_E8M0": "E8M0",
}
_SAME_NAMES = (
    *("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"),
    *("F64", "F32", "F16", "BF16", "C64", "F4", "F6_E2M3", "F6_E3M2"),
)
DTYPES: Mapping[str, BlockType] = MappingProxyType(
    {name: BLOCK_TYPES[name] for name in _SAME_NAMES}
    | {name: BLOCK_TYPES[own] for name, own in _OWN_NAMES.items()}
)
"""Storage type of each safetensors dtype."""


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The tensors of one safetensors file, or of all shards of a directory."""

    path: Path
    """The file, or the directory."""
    tensors: Mapping[str, TensorRecord]
    """Every tensor by name."""
    metadata: Mapping[str, str]
    """`__metadata__` of the file (of shards: the union, first file wins)."""
    files: tuple[MappedFile, ...]
    """The mappings that the tensors point into."""
    warnings: tuple[str, ...] = field(default=())
    """Oddities that do not keep the tensors from being used."""

    def close(self) -> None:
        """Close every file; views already handed out stay valid until garbage collected."""
        for file in self.files:
            file.close()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_safetensors(path: Path) -> SafetensorsFile:
    """Open one file and check its header.

    Args:
        path: a `.safetensors` file.

    Raises:
        FormatError: missing, truncated, or a header that breaks a rule of the format.
    """
    path = Path(path)
    with ExitStack() as stack:
        file = stack.enter_context(MappedFile.open(path))
        tensors, metadata = _read_header(file)
        stack.pop_all()
    return SafetensorsFile(
        path, MappingProxyType(tensors), MappingProxyType(metadata), files=(file,)
    )


def _read_header(file: MappedFile) -> tuple[dict[str, TensorRecord], dict[str, str]]:
    data_start = _data_start(file)
    if file.buffer[_PREFIX_BYTES] != ord("{"):
        raise FormatError("the header must begin with '{'", path=file.path, offset=_PREFIX_BYTES)
    scanner = JsonScanner(file.buffer, _PREFIX_BYTES, data_start, file.path)
    tensors: dict[str, TensorRecord] = {}
    metadata: dict[str, str] | None = None
    limit = record_limit(file.size)
    for name in scanner.members():
        if name == "__metadata__":
            if metadata is not None:
                raise scanner.fault("__metadata__ appears twice")
            metadata = _read_metadata(scanner)
            continue
        if name in tensors:
            raise scanner.fault(f"tensor {quoted(name)} appears twice")
        if len(tensors) == limit:
            raise scanner.fault(f"more than {limit:,} tensors in {file.size:,} bytes")
        at = scanner.position
        try:
            tensors[name] = _record(name, scanner.value(MAX_ENTRY_BYTES), file, data_start)
        except ValueError as error:
            fault: Fault = "truncated" if isinstance(error, _CutOffError) else "format"
            raise scanner.fault(f"tensor {quoted(name)}: {error}", at, fault) from error
    scanner.finish()
    _require_contiguous(tensors, file, data_start)
    return tensors, metadata or {}


def record_limit(size: int) -> int:
    """Tensors that files of `size` bytes together may declare."""
    return FREE_RECORDS + size // RECORD_BYTES


class _CutOffError(ValueError):
    """A tensor lies past the end of the file."""


def _data_start(file: MappedFile) -> int:
    if file.size < _PREFIX_BYTES:
        raise FormatError(
            f"{file.size} bytes, too short for a safetensors file",
            path=file.path,
            offset=0,
            fault="truncated",
        )
    length = int.from_bytes(file.view(0, _PREFIX_BYTES).tobytes(), "little")
    rest = file.size - _PREFIX_BYTES
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise FormatError(
            f"header length must be 2..{MAX_HEADER_BYTES:,} bytes, found {length:,};"
            " is this a safetensors file?",
            path=file.path,
            offset=0,
        )
    if length > rest:
        raise FormatError(
            f"the header has {length:,} bytes, {rest:,} are present: truncated download?",
            path=file.path,
            offset=0,
            fault="truncated",
        )
    return _PREFIX_BYTES + length


def _read_metadata(scanner: JsonScanner) -> dict[str, str]:
    metadata: dict[str, str] = {}
    total = 0
    for name in scanner.members():
        if name in metadata:
            raise scanner.fault(f"__metadata__ has {quoted(name)} twice")
        metadata[name] = scanner.string(MAX_METADATA_BYTES)
        total += len(name) + len(metadata[name]) + 100
        if total > MAX_METADATA_BYTES:
            raise scanner.fault(f"__metadata__ is larger than {MAX_METADATA_BYTES:,} bytes")
    return metadata


def _record(name: str, entry: object, file: MappedFile, data_start: int) -> TensorRecord:
    """One tensor from its header entry; faults are ValueErrors, the caller knows the place."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("expected an object of dtype, shape and data_offsets")
    kind = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if kind is None:
        raise ValueError(f"unknown dtype {quoted(entry['dtype'])}")
    shape = _integers(entry["shape"], "shape")
    offsets = _integers(entry["data_offsets"], "data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets must be [begin, end], found {quoted(list(offsets))}")
    begin, end = offsets
    if end > file.size - data_start:
        raise _CutOffError(
            f"ends at data byte {end:,} of {file.size - data_start:,}: truncated download?"
        )
    nbytes = _stored_bytes(kind, shape)
    if nbytes != end - begin:
        raise ValueError(
            f"{kind.name} {list(shape)} takes {nbytes:,} bytes, data_offsets span {end - begin:,}"
        )
    return TensorRecord(name, shape, kind, nbytes, data_start + begin, file)


def _integers(value: object, what: str) -> tuple[int, ...]:
    # bool is a subclass of int, and no dim.
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise ValueError(f"{what} must be a list of integers, found {quoted(value)}")
    if any(not 0 <= item < 1 << 63 for item in value):
        raise ValueError(f"{what} must hold 0..2^63-1, found {quoted(value)}")
    return tuple(value)


def _stored_bytes(kind: BlockType, shape: tuple[int, ...]) -> int:
    elements = 1
    for dim in shape:
        elements *= dim
        if elements >= 1 << 63:
            raise ValueError(f"shape {quoted(list(shape))} overflows")
    row = shape[-1] if shape else 1
    if row % kind.block_elements:
        raise ValueError(f"rows of {kind.name} must be a multiple of {kind.block_elements} long")
    return elements // kind.block_elements * kind.block_bytes


def _require_contiguous(
    tensors: Mapping[str, TensorRecord], file: MappedFile, data_start: int
) -> None:
    expected = data_start
    for record in sorted(tensors.values(), key=lambda record: (record.offset, record.nbytes)):
        if record.offset != expected:
            what = "overlaps the tensor before it" if record.offset < expected else "leaves a hole"
            raise FormatError(
                f"tensor {quoted(record.name)} {what}: it begins at data byte"
                f" {record.offset - data_start:,}, expected {expected - data_start:,}",
                path=file.path,
                offset=record.offset,
            )
        expected += record.nbytes
    if expected != file.size:
        raise FormatError(
            f"{file.size - expected:,} bytes behind the last tensor belong to none",
            path=file.path,
            offset=expected,
        )


def read_safetensors_index(directory: Path) -> SafetensorsFile:
    """Open all weights of a checkpoint directory as one set of tensors.

    `model.safetensors.index.json` says which file holds which tensor; without it, every
    `*.safetensors` file of the directory is read.

    Args:
        directory: the checkpoint.

    Raises:
        FormatError: no such files, an index that names files that are missing or outside the
            directory or tensors that are not there, a tensor in two files, or a damaged file.
    """
    directory = Path(directory)
    index = directory / INDEX_NAME
    if index.exists() or index.is_symlink():
        placed = _read_index(index)
        names = sorted(set(placed.values()))
    else:
        placed = None
        found = (entry.name for entry in directory.glob("*.safetensors"))
        names = sorted(name for name in found if not name.startswith("."))
    if not names:
        raise FormatError("holds no safetensors file with weights", path=directory, fault="missing")
    _require_present(directory, names)
    with ExitStack() as stack:
        parts = [stack.enter_context(read_safetensors(directory / names[0]))]
        tensors = dict(parts[0].tensors)
        faults = FaultList(directory)
        for name in names[1:]:
            part = stack.enter_context(read_safetensors(directory / name))
            parts.append(part)
            _merge(tensors, part, parts, faults)
        faults.raise_if_any("the weight files contradict each other")
        warnings = () if placed is None else _compare_with_index(tensors, placed, index)
        stack.pop_all()
    metadata = {key: text for part in reversed(parts) for key, text in part.metadata.items()}
    return SafetensorsFile(
        directory,
        MappingProxyType(tensors),
        MappingProxyType(metadata),
        files=tuple(file for part in parts for file in part.files),
        warnings=warnings,
    )


def _require_present(directory: Path, names: list[str]) -> None:
    faults = FaultList(directory)
    for name in names:
        if not (directory / name).is_file():
            faults.add(f"file {quoted(name)} is missing: incomplete download?")
    faults.raise_if_any("weight files are missing", "missing")


def _merge(
    tensors: dict[str, TensorRecord],
    part: SafetensorsFile,
    parts: list[SafetensorsFile],
    faults: FaultList,
) -> None:
    for name, record in part.tensors.items():
        if name in tensors:
            other = tensors[name].file.path.name
            faults.add(f"tensor {quoted(name)} is in both {other} and {part.path.name}")
        tensors[name] = record
    limit = record_limit(sum(part.files[0].size for part in parts))
    if len(tensors) > limit:
        raise FormatError(f"more than {limit:,} tensors in all", path=part.path)


def _read_index(path: Path) -> dict[str, str]:
    """File name of every tensor; all names are plain file names of the same directory."""
    with MappedFile.open(path) as file:
        scanner = JsonScanner(file.buffer, 0, file.size, path)
        placed: dict[str, str] | None = None
        for name in scanner.members():
            if name != "weight_map":
                scanner.value(1 << 16)
                continue
            if placed is not None:
                raise scanner.fault("weight_map appears twice")
            placed = _read_weight_map(scanner)
        scanner.finish()
    if not placed:
        raise FormatError("has no weight_map, or an empty one", path=path)
    return placed


def _read_weight_map(scanner: JsonScanner) -> dict[str, str]:
    placed: dict[str, str] = {}
    files: dict[str, str] = {}
    for name in scanner.members():
        if name in placed:
            raise scanner.fault(f"tensor {quoted(name)} appears twice")
        if len(placed) == MAX_INDEX_NAMES:
            raise scanner.fault(f"more than {MAX_INDEX_NAMES:,} tensors")
        at = scanner.position
        file = scanner.string(255)
        if not _is_plain_name(file):
            raise scanner.fault(
                f"tensor {quoted(name)} is said to be in {quoted(file)}: only files of the"
                " same directory can be named",
                at,
            )
        placed[name] = files.setdefault(file, file)
    return placed


def _is_plain_name(name: str) -> bool:
    is_one_part = Path(name).name == name and "\\" not in name and "\0" not in name
    return bool(name) and is_one_part and not name.startswith(".")


def _compare_with_index(
    tensors: dict[str, TensorRecord], placed: Mapping[str, str], index: Path
) -> tuple[str, ...]:
    """Every placed tensor must be where the index says; others are dropped with a warning."""
    faults = FaultList(index)
    for name, file in placed.items():
        record = tensors.get(name)
        if record is None:
            faults.add(f"tensor {quoted(name)} is not in {file}")
        elif record.file.path.name != file:
            faults.add(f"tensor {quoted(name)} is in {record.file.path.name}, not in {file}")
    faults.raise_if_any("the index names tensors that are not where it says")
    unlisted = [name for name in tensors if name not in placed]
    for name in unlisted:
        del tensors[name]
    if not unlisted:
        return ()
    return (
        f"{index.name} leaves out {len(unlisted):,} tensors of its files, such as"
        f" {quoted(unlisted[0])}; they are not used",
    )
