"""What the builds read from `dsv4.h`: declarations for cffi, and the functions that Python fills.

The header marks its interface with comments in brackets, and in it the functions that are plain C.
No prototype is written a second time: the table, the functions of the library that call it and the
names Python registers under are made from what stands there. Standard library only, since it runs
while the package is being built.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_BEGIN = "/* [interface: "
_END = "/* [end of the interface] */"
_PLAIN = ("/* [plain C] */", "/* [end of plain C] */")
_FUNCTION = re.compile(r"^int32_t (dsv4_\w+)\(([^;{}]*)\);", re.MULTILINE)
_ARGUMENT = re.compile(r"(\w+)$")


@dataclass(frozen=True, slots=True)
class Function:
    """A function that Python fills."""

    name: str
    parameters: str
    """As in the header, on one line."""

    @property
    def arguments(self) -> str:
        """The names alone, as a call passes them on."""
        if self.parameters == "void":
            return ""
        names = (_ARGUMENT.search(part) for part in self.parameters.split(","))
        return ", ".join(found[1] for found in names if found)

    @property
    def member(self) -> str:
        """The pointer to it in the table."""
        return f"int32_t (*{self.name.removeprefix('dsv4_')})({self.parameters});"


@dataclass(frozen=True, slots=True)
class Header:
    """The interface, without comments."""

    path: Path
    declarations: str
    """Types, constants and callback types; no function."""
    functions: tuple[Function, ...]
    """In the order of the header."""
    abi_version: int


def header_path() -> Path:
    """Where the header is: in a checkout at its top, in an installed package beside this file."""
    here = Path(__file__).resolve().parent
    places = (here.parent.parent / "include" / "dsv4.h", here / "include" / "dsv4.h")
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(f"dsv4.h is at none of {', '.join(map(str, places))}")


def read_header(path: Path | None = None) -> Header:
    """Read the interface.

    Raises:
        ValueError: the marks are missing, or a function is not declared on its own.
    """
    path = path or header_path()
    text = path.read_text(encoding="utf-8")
    version = re.search(r"#define DSV4_ABI_VERSION (\d+)", text)
    if version is None or _BEGIN not in text or _END not in text:
        raise ValueError(f"{path}: the marks of the interface or DSV4_ABI_VERSION are missing")
    body = text[text.index(_BEGIN) : text.index(_END)]
    plain = body[body.index(_PLAIN[0]) : body.index(_PLAIN[1])]
    body = _without_comments(body.replace(plain, ""))
    functions = tuple(
        Function(name, " ".join(parameters.split())) for name, parameters in _FUNCTION.findall(body)
    )
    return Header(path, _FUNCTION.sub("", body), functions, int(version[1]))


def table_declaration(header: Header) -> str:
    """C of the table through which the library calls Python."""
    members = "\n".join(f"    {function.member}" for function in header.functions)
    return f"typedef struct dsv4_table {{\n{members}\n}} dsv4_table;\n"


def _without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
