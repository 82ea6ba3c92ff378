"""Opens a GGUF model that was split over several files, and checks that the files belong together.

Each part is a complete GGUF file named `NAME-00001-of-00003.gguf`, with its own tensor table and
the keys `split.no` (0-based), `split.count` and `split.tensors.count`; the model's metadata stand
in the first part.

Source: the gguf-split tool of llama.cpp.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from edgedsv4.errors import Fault, FormatError
from edgedsv4.formats.gguf_part import GgufFile, read_part
from edgedsv4.formats.gguf_values import INTEGER_TYPES, MetadataValue

if TYPE_CHECKING:
    from edgedsv4.formats.tensor_record import TensorRecord

_PART_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.gguf", re.DOTALL)
MAX_PARTS = (1 << 16) - 1
_NAMED_FILES = 8


def part_name(prefix: str, number: int, count: int) -> str:
    """File name of part `number` (1-based) of `count`."""
    return f"{prefix}-{number:05d}-of-{count:05d}.gguf"


def open_parts(path: Path) -> GgufFile:
    """Open a file, and if it is part of a set all its siblings, as one `GgufFile`.

    Raises:
        FormatError: if a part is missing, damaged, numbered wrongly, or of another model.
    """
    named = read_part(path)
    parts = [named]
    try:
        count = _integer(named, "split.count", default=1)
        if not 1 <= count <= MAX_PARTS:
            _fail(path, f"split.count is {count:,}, expected 1..{MAX_PARTS:,}")
        if count == 1:
            return _alone(named)
        siblings = _sibling_paths(named, count)
        parts = [
            named if sibling.name == path.name else _open_sibling(sibling, parts)
            for sibling in siblings
        ]
        return _merge(path, parts)
    except BaseException:
        for part in parts:
            part.close()
        raise


def _open_sibling(path: Path, opened: list[GgufFile]) -> GgufFile:
    """Open one more part and remember it, so that a failure later on closes it."""
    part = read_part(path)
    opened.append(part)
    return part


def _integer(part: GgufFile, key: str, default: int | None = None) -> int:
    value = part.metadata.get(key, default)
    kind = part.value_types.get(key)
    if not isinstance(value, int) or (kind is not None and kind not in INTEGER_TYPES):
        found = "missing" if value is None else f"{value!r}"
        _fail(part.path, f"{key} is {found}, expected an integer")
    if not 0 <= value < 1 << 31:
        _fail(part.path, f"{key} is {value:,}, expected 0..2^31-1")
    return value


def _alone(part: GgufFile) -> GgufFile:
    if _integer(part, "split.no", default=0) != 0:
        _fail(part.path, "split.no is not 0 in a set of one file")
    total = _integer(part, "split.tensors.count", default=len(part.tensors))
    if total != len(part.tensors):
        _fail(part.path, f"split.tensors.count is {total:,}, the file has {len(part.tensors):,}")
    match = _PART_NAME.fullmatch(part.path.name)
    if match is None or int(match["count"]) == 1:
        return part
    note = f"{part.path}: named as a part of a set, but complete by itself (no split.count)"
    return replace(part, warnings=(*part.warnings, note))


def _sibling_paths(part: GgufFile, count: int) -> list[Path]:
    """All paths of the set, every one of which exists."""
    number = _integer(part, "split.no") + 1
    match = _PART_NAME.fullmatch(part.path.name)
    if match is None:
        example = part_name("NAME", number, count)
        _fail(
            part.path,
            f"is part {number} of {count} of a set, so it must be named like {example}, the other"
            " parts beside it; or merge them with llama-gguf-split --merge",
        )
    if int(match["count"]) != count:
        _fail(part.path, f"split.count is {count}, the file name says {int(match['count'])}")
    paths = [part.path.with_name(part_name(match["prefix"], n, count)) for n in range(1, count + 1)]
    if part.path.name not in {path.name for path in paths}:
        _fail(part.path, f"must be named {part_name(match['prefix'], number, count)}")
    missing = list(islice((p.name for p in paths if not p.exists()), _NAMED_FILES + 1))
    if missing:
        more = " and more" if len(missing) > _NAMED_FILES else ""
        names = ", ".join(missing[:_NAMED_FILES])
        _fail(part.path, f"of its {count} parts are missing beside it: {names}{more}", "missing")
    return paths


def _merge(path: Path, parts: list[GgufFile]) -> GgufFile:
    first = parts[0]
    tensors: dict[str, TensorRecord] = {}
    for index, part in enumerate(parts):
        _check_number(part, index, len(parts))
        _check_same_model(first, part)
        for name, record in part.tensors.items():
            if name in tensors:
                _fail(part.path, f"tensor {name} is already in {tensors[name].file.path.name}")
            tensors[name] = record
    _check_total(parts, len(tensors))
    return GgufFile(
        path=path,
        version=first.version,
        alignment=first.alignment,
        data_offset=first.data_offset,
        metadata=first.metadata,
        value_types=first.value_types,
        tensors=tensors,
        warnings=tuple(warning for part in parts for warning in part.warnings),
        files=tuple(file for part in parts for file in part.files),
    )


def _check_number(part: GgufFile, index: int, count: int) -> None:
    found = _integer(part, "split.count"), _integer(part, "split.no")
    if found[0] != count:
        _fail(part.path, f"split.count is {found[0]}, the other parts say {count}")
    if found[1] != index:
        _fail(part.path, f"split.no is {found[1]}, the file name says {index}: copied or renamed?")


def _check_total(parts: list[GgufFile], total: int) -> None:
    for part in parts:
        claimed = _integer(part, "split.tensors.count")
        if claimed != total:
            _fail(
                part.path,
                f"split.tensors.count is {claimed:,}, the {len(parts)} parts hold {total:,}:"
                " parts of different models?",
            )


def _check_same_model(first: GgufFile, part: GgufFile) -> None:
    """What two parts both say must agree; alignment and numbering are each part's own."""
    for key, value in part.metadata.items():
        own = key.startswith("split.") or key == "general.alignment"
        if own or key not in first.metadata:
            continue
        if not _equal(value, first.metadata[key]):
            _fail(part.path, f"{key} differs from {first.path.name}: parts of different models?")


def _equal(a: MetadataValue, b: MetadataValue) -> bool:
    """Equality of type and value."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and repr(a) == repr(b)  # as text, NaN equals NaN


def _fail(path: Path, what: str, fault: Fault = "format") -> NoReturn:
    raise FormatError(what, path=path, fault=fault)
