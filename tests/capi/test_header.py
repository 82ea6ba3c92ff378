"""`dsv4.h` as a document and as C: clean for every compiler, one comment per function."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import cffi
import pytest
from capi.programs import CLANG, GCC, STRICT, Library, run

from edgedsv4.capi.bridge import ffi as bridge_ffi
from edgedsv4.capi.header import header_path, read_header

HEADER = header_path()
TEXT = HEADER.read_text(encoding="utf-8")
MAX_LINES = 900
PROTOTYPE = re.compile(
    r"^(?:int32_t|uint32_t|const char \*) ?(dsv4_\w+)\(([^;{}]*)\);", re.MULTILINE
)
FUNCTIONS = [match[1] for match in PROTOTYPE.finditer(TEXT)]
USES_ALL = '#include <dsv4.h>\nint main(void) { return dsv4_str("x").size != 1; }\n'


@pytest.mark.parametrize("compiler", [GCC, CLANG], ids=["gcc", "clang"])
@pytest.mark.parametrize("standard", ["c99", "c11", "c++11", "c++17"])
def test_it_compiles_without_a_warning(
    compiler: tuple[str, ...], standard: str, tmp_path: Path
) -> None:
    is_cpp = standard.startswith("c++")
    source = tmp_path / ("use.cc" if is_cpp else "use.c")
    source.write_text(USES_ALL, encoding="utf-8")
    language = ["-x", "c++"] if is_cpp else ["-x", "c"]
    flags = [f"-std={standard}", *STRICT, "-Wconversion", "-Wshadow", f"-I{HEADER.parent}"]
    run([*compiler, *language, *flags, "-c", str(source), "-o", str(tmp_path / "use.o")])


def test_it_needs_no_other_header_first(tmp_path: Path) -> None:
    source = tmp_path / "alone.c"
    source.write_text('#include "dsv4.h"\nsize_t a = DSV4_ZSTR;\nint32_t b;\n', encoding="utf-8")
    run([*GCC, "-std=c99", *STRICT, f"-I{HEADER.parent}", "-fsyntax-only", str(source)])


def test_cffi_reads_the_same_file() -> None:
    header = read_header()
    ffi = cffi.FFI()
    ffi.cdef(header.declarations)
    for function in header.functions:
        ffi.cdef(f"int32_t {function.name}({function.parameters});")
    sizes = {name: ffi.sizeof(name) for name in structs()}
    assert sizes == {name: bridge_ffi.sizeof(name) for name in structs()}


def structs() -> list[str]:
    """Names of the structs with members."""
    return re.findall(r"^typedef struct (dsv4_\w+) \{", TEXT, re.MULTILINE)


def test_every_struct_has_no_hidden_padding() -> None:
    # Two compilers, or two versions, would otherwise see another size.
    for name in structs():
        end = 0
        for member, field in bridge_ffi.typeof(name).fields:
            assert field.offset == end, f"{name}.{member}"
            end += bridge_ffi.sizeof(field.type)
        assert end == bridge_ffi.sizeof(name), name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_comment_stands_before_the_function(name: str) -> None:
    start = next(match.start() for match in PROTOTYPE.finditer(TEXT) if match[1] == name)
    before = TEXT[:start]
    assert before.endswith("*/\n")
    comment = before[before.rindex("/*") :]
    assert len(comment) > 20
    assert not comment.startswith("/* [")


def test_it_is_not_too_long() -> None:
    assert len(TEXT.splitlines()) <= MAX_LINES


def test_every_status_has_its_name(library: Library, tmp_path: Path) -> None:
    statuses = re.findall(r"^    (DSV4_(?:OK|ERR_\w+)) = (-?\d+)", TEXT, re.MULTILINE)
    lines = "\n".join(f"    puts(dsv4_status_name({name}));" for name, _ in statuses)
    source = tmp_path / "names.c"
    ends = (
        "puts(dsv4_status_name(1)); puts(dsv4_status_name(-21)); puts(dsv4_status_name(INT32_MIN));"
    )
    source.write_text(
        "#include <stdio.h>\n#include <dsv4.h>\n"
        f"int main(void)\n{{\n{lines}\n{ends} return 0;\n}}\n",
        encoding="utf-8",
    )
    said = run([str(library.program(source))]).split()
    assert said == [name for name, _ in statuses] + ["DSV4_ERR_UNKNOWN"] * 3
    assert [int(number) for _, number in statuses] == [-place for place in range(len(statuses))]


def test_only_the_functions_of_the_header_are_exported(library: Library) -> None:
    said = subprocess.run(
        ["nm", "-D", "--defined-only", str(library.prefix / "lib/libdsv4.so")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = {line.split()[-1].split("@")[0] for line in said.splitlines()}
    assert names == set(FUNCTIONS)


def test_python_fills_every_function() -> None:
    program = (
        "import edgedsv4.capi.bridge as bridge\n"
        "names = []\n"
        "bridge.exported = lambda function: names.append(function.__name__) or function\n"
        "import edgedsv4.capi.entry\n"
        "print(' '.join(names))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert sorted(done.stdout.split()) == sorted(f.name for f in read_header().functions)


def test_the_header_that_is_installed_is_the_same(library: Library) -> None:
    assert (library.prefix / "include/dsv4.h").read_bytes() == HEADER.read_bytes()
