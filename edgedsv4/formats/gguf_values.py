"""The typed fields of a GGUF header, read one after the other from untrusted bytes.

The cursor never trusts a length: it is compared with the bytes that remain, and with a budget for
the Python objects it would cost, before anything is looked at or made. Arrays of numbers are views
of the mapping and cost nothing; strings are objects, so a header of a few megabytes could otherwise
ask for gigabytes.

Source: the GGUF specification, version 3.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import Fault, FormatError

if TYPE_CHECKING:
    from edgedsv4.formats.mapped_file import MappedFile


class GgufType(IntEnum):
    """Number of a metadata value's type."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


NUMBER_TYPES: dict[GgufType, np.dtype[np.generic]] = {
    GgufType.U8: np.dtype("<u1"),
    GgufType.I8: np.dtype("<i1"),
    GgufType.U16: np.dtype("<u2"),
    GgufType.I16: np.dtype("<i2"),
    GgufType.U32: np.dtype("<u4"),
    GgufType.I32: np.dtype("<i4"),
    GgufType.F32: np.dtype("<f4"),
    GgufType.BOOL: np.dtype("?"),
    GgufType.U64: np.dtype("<u8"),
    GgufType.I64: np.dtype("<i8"),
    GgufType.F64: np.dtype("<f8"),
}
"""How each fixed-size type is stored."""

INTEGER_TYPES = frozenset(
    t for t, dtype in NUMBER_TYPES.items() if dtype.kind in "iu" and t is not GgufType.BOOL
)

MetadataArray: TypeAlias = npt.NDArray[np.generic] | list[str] | list["MetadataArray"]
MetadataValue: TypeAlias = int | float | bool | str | MetadataArray

MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 64
MAX_ARRAY_DEPTH = 4

# Upper bounds of what CPython needs, object and container slot together: a str of n UTF-8 bytes is
# at most 80 + 4n bytes, and up to 2n more while it is decoded; an ndarray or list is below 200, but
# reading one takes so long that its price also bounds the time.
_STRING_COST = 80
_STRING_COST_PER_BYTE = 6
_ARRAY_COST = 1000
_SLACK_BYTES = 64 << 20
_MAX_BUDGET_BYTES = 512 << 20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS = {
    GgufType.U8: struct.Struct("<B"),
    GgufType.I8: struct.Struct("<b"),
    GgufType.U16: struct.Struct("<H"),
    GgufType.I16: struct.Struct("<h"),
    GgufType.U32: _U32,
    GgufType.I32: struct.Struct("<i"),
    GgufType.F32: struct.Struct("<f"),
    GgufType.U64: _U64,
    GgufType.I64: struct.Struct("<q"),
    GgufType.F64: struct.Struct("<d"),
}
_ELEMENT_MIN_BYTES = {GgufType.STRING: 8, GgufType.ARRAY: 12}


def shortened(key: str) -> str:
    """A key as it should stand in a message."""
    return key if len(key) <= 100 else f"{key[:99]}…"


class Cursor:
    """A read position in a mapped file.

    Attributes:
        file: the mapping that is read.
        position: absolute offset of the next byte.
    """

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.position = 0
        self._data = file.buffer
        self._budget_bytes = min(file.size + _SLACK_BYTES, _MAX_BUDGET_BYTES)

    @property
    def remaining(self) -> int:
        """Bytes between the position and the end of the file."""
        return self.file.size - self.position

    def fail(self, what: str, offset: int | None = None, fault: Fault = "format") -> NoReturn:
        """Raise a `FormatError` for this file, at `offset` or at the position."""
        at = self.position if offset is None else offset
        raise FormatError(what, path=self.file.path, offset=at, fault=fault)

    def spend(self, nbytes: int, what: str) -> None:
        """Account for memory that objects will take; raise if it is too much, before they exist."""
        if nbytes > self._budget_bytes:
            self._refuse_cost(what)
        self._budget_bytes -= nbytes

    def need(self, nbytes: int, what: str) -> None:
        """Raise unless the file still holds `nbytes` bytes for `what`."""
        if nbytes > self.remaining:
            self.fail(
                f"{what} needs {nbytes:,} bytes, {self.remaining:,} are left in the file:"
                " truncated download?",
                fault="truncated",
            )

    def count(self, minimum_bytes: int, what: str) -> int:
        """Read a u64 count of things of at least `minimum_bytes` each that must still follow."""
        start = self.position
        count = self.u64(what)
        if count > self.remaining // minimum_bytes:
            self.fail(
                f"{what} is {count:,}, the {self.remaining:,} bytes left hold at most"
                f" {self.remaining // minimum_bytes:,}: truncated download?",
                start,
                "truncated",
            )
        return count

    def u32(self, what: str) -> int:
        """Read one u32."""
        return int(self._number(_U32, what))

    def u64(self, what: str) -> int:
        """Read one u64."""
        return int(self._number(_U64, what))

    def _number(self, form: struct.Struct, what: str) -> int | float:
        self.need(form.size, what)
        value: int | float = form.unpack_from(self._data, self.position)[0]
        self.position += form.size
        return value

    def string(self, what: str) -> str:
        """Read one string: u64 byte length and UTF-8 bytes."""
        start = self.position
        length = self.u64(f"length of {what}")
        self.need(length, what)
        self.spend(_STRING_COST + _STRING_COST_PER_BYTE * length, what)
        raw = self._data[self.position : self.position + length]
        self.position += length
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not valid UTF-8 ({error.reason})", start + 8 + error.start)

    def label(self, what: str, limit: int) -> str:
        """Read a string that names something: not empty, at most `limit` bytes, without NUL."""
        start = self.position
        self.need(8, f"length of {what}")
        length = _U64.unpack_from(self._data, start)[0]
        if not 0 < length <= limit:
            self.fail(f"{what} is {length:,} bytes long, expected 1..{limit:,}", start)
        text = self.string(what)
        if "\0" in text:
            self.fail(f"{what} {shortened(text)!r} contains a NUL", start)
        return text

    def value_type(self, what: str) -> GgufType:
        """Read the number of a value type."""
        start = self.position
        number = self.u32(what)
        try:
            return GgufType(number)
        except ValueError:
            self.fail(f"{what} is {number}, expected 0..12", start)

    def value(self, key: str) -> tuple[MetadataValue, GgufType]:
        """Read the value of a key, type included.

        Returns:
            the value, and its type: of an array the type of its elements.
        """
        what = f"key {shortened(key)!r}"
        value_type = self.value_type(f"type of {what}")
        if value_type is GgufType.ARRAY:
            return self._array(what, depth=1)
        if value_type is GgufType.STRING:
            return self.string(f"value of {what}"), value_type
        if value_type is GgufType.BOOL:
            return self._bool(f"value of {what}"), value_type
        return self._number(_SCALARS[value_type], f"value of {what}"), value_type

    def _bool(self, what: str) -> bool:
        self.need(1, what)
        byte = self._data[self.position]
        if byte > 1:
            self.fail(f"{what} is {byte}, a bool must be 0 or 1")
        self.position += 1
        return bool(byte)

    def _array(self, what: str, depth: int) -> tuple[MetadataArray, GgufType]:
        if depth > MAX_ARRAY_DEPTH:
            self.fail(f"{what} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        self.spend(_ARRAY_COST, what)
        element = self.value_type(f"element type of {what}")
        if element in NUMBER_TYPES:
            return self._numbers(element, what), element
        count = self.count(_ELEMENT_MIN_BYTES[element], f"length of {what}")
        if element is GgufType.STRING:
            return self._strings(count, what), element
        return [self._array(what, depth + 1)[0] for _ in range(count)], element

    def _numbers(self, element: GgufType, what: str) -> npt.NDArray[np.generic]:
        dtype = NUMBER_TYPES[element]
        count = self.count(dtype.itemsize, f"length of {what}")
        raw = self.file.view(self.position, count * dtype.itemsize)
        if element is GgufType.BOOL and count and raw.max() > 1:
            first = int(np.argmax(raw > 1))
            self.fail(
                f"{what}[{first}] is {raw[first]}, a bool must be 0 or 1", self.position + first
            )
        self.position += raw.size
        return raw.view(dtype)

    def _strings(self, count: int, what: str) -> list[str]:
        """Read `count` strings; the loop that decides how fast a vocabulary loads."""
        if _STRING_COST * count > self._budget_bytes:
            self._refuse_cost(what)
        data, position, unpack = self._data, self.position, _U64.unpack_from
        # The price of a string, as one per byte on disk (length field included) and a fixed rest.
        base_cost = count * (_STRING_COST - 8 * _STRING_COST_PER_BYTE)
        affordable = (self._budget_bytes - base_cost) // _STRING_COST_PER_BYTE
        limit = min(self.file.size, position + affordable)
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(count):
                start = position + 8
                end = start + unpack(data, position)[0]
                if end > limit:
                    self.position = position
                    self._refuse_string(end - start, f"{what}[{len(strings)}]")
                append(str(data[start:end], "utf-8"))
                position = end
        except UnicodeDecodeError as error:
            self.fail(
                f"{what}[{len(strings)}] is not valid UTF-8 ({error.reason})", start + error.start
            )
        except struct.error:
            self.fail(
                f"the file ends inside {what}[{len(strings)}]: truncated download?",
                position,
                "truncated",
            )
        self.spend(base_cost + _STRING_COST_PER_BYTE * (position - self.position), what)
        self.position = position
        return strings

    def _refuse_string(self, length: int, what: str) -> NoReturn:
        self.position += 8
        self.need(length, what)
        self._refuse_cost(what)

    def _refuse_cost(self, what: str) -> NoReturn:
        self.fail(f"{what} would need more memory than a header may take: damaged file?")
