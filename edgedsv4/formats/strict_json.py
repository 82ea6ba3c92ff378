"""JSON from files nobody vouches for: bounded size and numbers, no name twice, no NaN."""

from __future__ import annotations

import json
import math
from pathlib import Path

from edgedsv4.errors import FormatError
from edgedsv4.formats.faults import quoted

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]

_MAX_DIGITS = 40


def read_json_object(
    path: Path, *, limit_bytes: int, limit_values: int | None = None
) -> dict[str, JsonValue]:
    """Read a JSON file that must hold one object.

    Args:
        path: a regular file.
        limit_bytes: a larger file is refused before it is parsed.
        limit_values: so are more lists, objects and members than this in all: each may take a
            hundred times the memory of its bytes.

    Raises:
        FormatError: unreadable, too large, not UTF-8, not JSON, not an object, with a name twice,
        NaN or infinity, or
            numbers and nesting no such file needs.
    """
    if not path.is_file():
        raise FormatError("no such file", path=path, fault="missing")
    size = path.stat().st_size
    if size > limit_bytes:
        raise FormatError(f"{size:,} bytes, expected at most {limit_bytes:,}", path=path)
    try:
        data = path.read_bytes()
        values = data.count(b"[") + data.count(b"{") + data.count(b",")
        if limit_values is not None and values > limit_values:
            raise ValueError(f"holds more than {limit_values:,} values")
        return parse_json_object(data)
    except OSError as error:
        raise FormatError(f"cannot be read: {error}", path=path) from error
    except ValueError as error:
        raise FormatError(str(error), path=path) from error


def parse_json_object(data: bytes) -> dict[str, JsonValue]:
    """Parse bytes that must hold one JSON object, with the same strictness.

    Raises:
        ValueError: it does not; the message continues a sentence ("the file ...").
    """
    try:
        value: JsonValue = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_bounded,
        )
    except RecursionError as error:
        raise ValueError("is not usable JSON: nested too deep") from error
    except ValueError as error:
        raise ValueError(f"is not usable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"must hold a JSON object, found {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    found: dict[str, JsonValue] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"name {quoted(name)} appears twice")
        found[name] = value
    return found


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {quoted(text)} does not fit a float")
    return value


def _bounded(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)
