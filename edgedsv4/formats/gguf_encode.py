"""Turns Python values into the typed fields of a GGUF header: the inverse of `gguf_values`.

Nothing is converted on the way that would not come back the same: an integer that does not fit, a
bool among numbers or a float too large for its type is an error.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import ConfigError
from edgedsv4.formats.gguf_values import NUMBER_TYPES, GgufType, MetadataValue


def label_bytes(text: str, what: str, limit: int) -> bytes:
    """The UTF-8 bytes of a key or name.

    Raises:
        ConfigError: if it is empty, longer than `limit` bytes, contains NUL, or is not text.
    """
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} {text!r} is not text: {error.reason}") from error
    if not 0 < len(raw) <= limit or b"\0" in raw:
        raise ConfigError(f"{what} {text!r} must be 1..{limit:,} bytes of UTF-8 without NUL")
    return raw


def string_bytes(text: str) -> bytes:
    """A string as GGUF stores it: u64 byte length and UTF-8 bytes."""
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(value: MetadataValue, value_type: GgufType) -> bytes:
    """A value with its type in front; lists and arrays become arrays of `value_type`.

    Raises:
        TypeError, ValueError: if the value is of another kind, or does not fit the type.
    """
    if isinstance(value, (list, tuple, np.ndarray)):
        return struct.pack("<I", GgufType.ARRAY) + _array_bytes(value, value_type)
    if value_type is GgufType.STRING:
        if not isinstance(value, str):
            raise TypeError(f"expected text, found {value!r}")
        return struct.pack("<I", value_type) + string_bytes(value)
    if value_type is GgufType.ARRAY:
        raise TypeError(f"expected a list or array, found {value!r}")
    return struct.pack("<I", value_type) + _number_bytes([value], value_type)


def _array_bytes(values: MetadataValue, element: GgufType) -> bytes:
    """Element type, length and elements."""
    if not isinstance(values, (list, tuple, np.ndarray)):
        raise TypeError(f"expected a list or array, found {values!r}")
    head = struct.pack("<IQ", element, len(values))
    if element is GgufType.STRING:
        return head + b"".join(string_bytes(text) for text in _texts(values))
    if element is GgufType.ARRAY:
        return head + b"".join(_array_bytes(inner, _element_type(inner)) for inner in values)
    return head + _number_bytes(values, element)


def _texts(values: Sequence[object] | npt.NDArray[np.generic]) -> Iterator[str]:
    for text in values:
        if not isinstance(text, str):
            raise TypeError(f"expected text, found {text!r}")
        yield text


def _element_type(values: object) -> GgufType:
    """Type of the elements of an inner array, which has no type of its own."""
    if isinstance(values, list):
        return GgufType.STRING if all(isinstance(v, str) for v in values) else GgufType.ARRAY
    if isinstance(values, np.ndarray):
        for value_type, dtype in NUMBER_TYPES.items():
            if dtype == values.dtype:
                return value_type
    raise TypeError(f"expected a list or an array of numbers, found {values!r}")


def _number_bytes(values: object, value_type: GgufType) -> bytes:
    dtype = NUMBER_TYPES[value_type]
    given = np.asarray(values)
    if given.size == 0:
        return b""
    if given.ndim != 1 or not _fits(given, dtype):
        raise TypeError(f"found {given.dtype} of shape {given.shape}: {given.ravel()[:3]}")
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(given.astype(dtype))
    if dtype.kind == "f" and np.isinf(stored).sum() != np.isinf(given).sum():
        raise ValueError(f"too large for {dtype.name}")
    return stored.tobytes()


def _fits(given: npt.NDArray[np.generic], dtype: np.dtype[np.generic]) -> bool:
    """Whether numbers keep their kind and, for integers, their value."""
    if dtype.kind == "b" or given.dtype.kind == "b":
        return dtype.kind == given.dtype.kind
    if dtype.kind == "f":
        return given.dtype.kind in "fiu"
    if given.dtype.kind not in "iu":
        return False
    bits = 8 * dtype.itemsize
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if dtype.kind == "i" else (0, 1 << bits)
    return low <= int(given.min()) and int(given.max()) < high
