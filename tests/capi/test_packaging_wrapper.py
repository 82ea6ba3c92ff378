"""`dsv4.hpp`: clean for two compilers, and every part of it does what `dsv4.h` does."""

from __future__ import annotations

from pathlib import Path

import pytest
from capi.programs import CLANG, HERE, POCKET, STRICT, Library, Results, checks_in, run

from edgedsv4.capi.header import header_path

SOURCE = HERE / "wrapper.cc"
WRAPPER = header_path().with_name("dsv4.hpp")
COMPILERS = {"gcc": ("g++",), "clang": (*CLANG[:-1], "c++")}


@pytest.mark.parametrize("compiler", COMPILERS.values(), ids=COMPILERS)
def test_it_compiles_without_a_warning(compiler: tuple[str, ...], tmp_path: Path) -> None:
    flags = ["-std=c++17", *STRICT, "-Wconversion", "-Wshadow", f"-I{WRAPPER.parent}"]
    run([*compiler, *flags, f"-I{HERE}", "-c", str(SOURCE), "-o", str(tmp_path / "x.o")])


def test_two_files_of_a_program_may_include_it(tmp_path: Path) -> None:
    one, two = tmp_path / "one.cc", tmp_path / "two.cc"
    one.write_text("#include <dsv4.hpp>\nint main() {}\n", encoding="utf-8")
    two.write_text("#include <dsv4.hpp>\n#include <dsv4.hpp>\nint two;\n", encoding="utf-8")
    flags = ["-std=c++17", *STRICT, f"-I{WRAPPER.parent}", "-c"]
    objects = [str(path.with_suffix(".o")) for path in (one, two)]
    for source, target in zip((one, two), objects, strict=True):
        run(["g++", *flags, str(source), "-o", target])
    # Nothing in it may be defined twice; what it calls is not there, and need not be.
    run(["g++", "-r", *objects, "-o", str(tmp_path / "both.o")])


@pytest.fixture(scope="module")
def results(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Results:
    program = library.work / "wrapper"
    # The checks of memory accesses and of undefined behaviour come with every compiler here.
    flags = ["-std=c++17", "-g", "-O1", *STRICT, "-fsanitize=address,undefined"]
    run(["g++", *flags, *library.flags(SOURCE, program)])
    # Python keeps its own memory to the end, which is no leak of the wrapper.
    environment = {"ASAN_OPTIONS": "detect_leaks=0"}
    folder = tmp_path_factory.mktemp("state")
    return Results(run([str(program), POCKET, str(folder)], environment=environment))


@pytest.mark.parametrize("name", checks_in(SOURCE))
def test_wrapper(results: Results, name: str) -> None:
    assert results[name] == "ok"
