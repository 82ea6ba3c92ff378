"""C values to Python's and back: texts, arrays, structs of several versions, two-call results."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgedsv4 import ConfigError
from edgedsv4.capi.bridge import AbiError, BufferTooSmallError, ffi

_ZSTR = (1 << 64) - 1
_SMALLEST_STRUCT = 8
_LARGEST_STRUCT = 1 << 16
_MOST = 1 << 40
# Of tokens and bytes of text: a length of 32 bits with the wrong sign is beyond it.
_MOST_ITEMS = (1 << 31) - 1


def required(pointer: Any, name: str) -> Any:
    """The pointer, which must not be NULL."""
    if not pointer:
        raise ConfigError(f"{name} must not be NULL", name=name)
    return pointer


def bounded(size: int, name: str, most: int = _MOST) -> int:
    """A length that some memory could have; others come from a subtraction gone wrong."""
    if size > most:
        raise ConfigError(f"{name} must be at most {most:,}, found {size:,}", name=name)
    return size


def text_of(text: Any, name: str) -> str:
    """The text of a `dsv4_text`.

    Raises:
        ConfigError: it is NULL with a length, or no UTF-8.
    """
    if not text.data:
        if text.size and text.size != _ZSTR:
            what = f"{name}.data must not be NULL when its size is {text.size}"
            raise ConfigError(what, name=name)
        return ""
    if text.size == _ZSTR:
        return decoded(ffi.string(text.data), name)
    size = bounded(text.size, f"{name}.size", _MOST_ITEMS)
    return decoded(bytes_of(text.data, size, name), name)


def bytes_of(pointer: Any, size: int, name: str) -> bytes:
    """A copy of some bytes."""
    return bytes(ffi.buffer(required(pointer, name), bounded(size, "size")))


def decoded(data: bytes, name: str) -> str:
    """Bytes as UTF-8, or a message that says where they are none."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} must be UTF-8, found byte {data[error.start]:#04x} at {error.start}", name=name
        ) from None


def word_of(pointer: Any, name: str) -> str:
    """A NUL-terminated name or number."""
    return decoded(ffi.string(required(pointer, name)), name)


def path_of(pointer: Any, name: str = "path") -> str:
    """A NUL-terminated path."""
    path = os.fsdecode(ffi.string(required(pointer, name)))
    if not path:
        raise ConfigError(f"{name} must not be empty", name=name)
    return path


def tokens_of(pointer: Any, count: int, name: str = "tokens") -> list[int]:
    """An array of token ids, which may be NULL when it is empty."""
    if not count:
        return []
    return list(ffi.unpack(required(pointer, name), bounded(count, "count", _MOST_ITEMS)))


def put_text(text: str, buffer: Any, capacity: int, size: Any) -> int:
    """A result in UTF-8, without a terminating NUL."""
    return put_bytes(text.encode("utf-8", "replace"), buffer, capacity, size)


def put_json(document: object, buffer: Any, capacity: int, size: Any) -> int:
    """A result as JSON."""
    return put_text(json.dumps(document, ensure_ascii=False), buffer, capacity, size)


def put_bytes(
    data: bytes | memoryview | npt.NDArray[np.generic], buffer: Any, capacity: int, size: Any
) -> int:
    """A result of bytes: its length in `size`, and itself where there is room."""
    nbytes = data.nbytes if isinstance(data, (memoryview, np.ndarray)) else len(data)
    if _has_room(nbytes, buffer, capacity, required(size, "size"), "buffer"):
        ffi.memmove(buffer, data, nbytes)
    return 0


def put_tokens(
    token_ids: Sequence[int], buffer: Any, capacity: int, count: Any, *, length_name: str = "count"
) -> int:
    """A result of token ids."""
    found = np.asarray(token_ids, dtype=np.int32)
    if _has_room(found.size, buffer, capacity, required(count, length_name), "tokens"):
        ffi.memmove(buffer, found, found.nbytes)
    return 0


def put_floats(values: npt.NDArray[np.float32], buffer: Any, capacity: int, count: Any) -> int:
    """A result of floats."""
    if _has_room(values.size, buffer, capacity, required(count, "count"), "logits"):
        ffi.memmove(buffer, np.ascontiguousarray(values, dtype=np.float32), 4 * values.size)
    return 0


def _has_room(needed: int, buffer: Any, capacity: int, size: Any, name: str) -> bool:
    """Store the length; whether the result is to be stored as well."""
    size[0] = needed
    if not buffer:
        if capacity:
            what = f"{name} must not be NULL when its capacity is {capacity}"
            raise ConfigError(what, name=name)
        return False
    if capacity < needed:
        raise BufferTooSmallError(name, needed, capacity)
    return needed > 0


def read_struct(pointer: Any, kind: str, defaults: Any) -> Any:
    """A copy of a struct of any version, members that it lacks from `defaults` (a `kind *`).

    Raises:
        AbiError: its struct_size is none that a header ever had, or it uses members that this
            library does not know.
    """
    known = ffi.sizeof(kind)
    size = checked_size(pointer.struct_size, kind)
    copy = ffi.new(f"{kind} *", defaults[0])
    ffi.memmove(copy, pointer, min(size, known))
    copy.struct_size = known
    if _has_reserved(kind) and copy.reserved:
        raise ConfigError(f"reserved of {kind} must be 0, found {copy.reserved}", name="reserved")
    tail = ffi.buffer(ffi.cast("char *", pointer) + known, max(0, size - known))
    if any(tail[:]):
        raise AbiError(
            f"{kind} has {size} bytes and uses members behind the {known} that this library knows;"
            " compile with its dsv4.h"
        )
    return copy


def write_struct(pointer: Any, kind: str, filled: Any) -> None:
    """Write a struct in the version of the caller, who set its struct_size."""
    known = ffi.sizeof(kind)
    size = checked_size(pointer.struct_size, kind)
    if size > known:
        ffi.memmove(ffi.cast("char *", pointer) + known, bytes(size - known), size - known)
    filled.struct_size = size
    ffi.memmove(pointer, filled, min(size, known))


def checked_size(size: int, kind: str) -> int:
    """A struct_size, which must end where a member begins or behind the last."""
    known = ffi.sizeof(kind)
    is_of_a_header = size in _member_ends(kind) or known < size <= _LARGEST_STRUCT
    if size < _SMALLEST_STRUCT or not is_of_a_header:
        raise AbiError(
            f"struct_size of {kind} must be sizeof({kind}), here {known}, found {size};"
            " set it before the call"
        )
    return size


@functools.cache
def _member_ends(kind: str) -> frozenset[int]:
    ctype = ffi.typeof(kind)
    starts = [field.offset for _, field in ctype.fields]
    ends = [field.offset + ffi.sizeof(field.type) for _, field in ctype.fields]
    return frozenset((*starts, *ends, ffi.sizeof(kind)))


@functools.cache
def _has_reserved(kind: str) -> bool:
    return any(name == "reserved" for name, _ in ffi.typeof(kind).fields)


_kept_words: dict[str, Any] = {}


def word(text: str) -> Any:
    """A NUL-terminated text that lives for ever, one for each value."""
    if text not in _kept_words:
        _kept_words[text] = ffi.new("char[]", text.encode())
    return _kept_words[text]
