"""What a prefix holds beside the library, tried with the real CMake and pkg-config."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import cmake
import pkgconf
import pytest
from capi.programs import GCC, POCKET, ROOT, STRICT, Library, run

import edgedsv4

EXAMPLES = ROOT / "examples"
CMAKE = str(Path(cmake.CMAKE_BIN_DIR) / "cmake")
PKG_CONFIG = str(pkgconf.get_executable())
QUESTION, ANSWER = "What is the capital of Peru?\n", "The capital of Peru is Lima.\n"
NUMBERS = re.match(r"\d+\.\d+\.\d+", edgedsv4.__version__)
VERSION = NUMBERS[0] if NUMBERS else ""
TOOLS = {"PATH": "/usr/bin:/bin"}


@pytest.fixture(scope="module")
def moved(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix in another folder than it was built in, with a name that is awkward."""
    prefix = tmp_path_factory.mktemp("moved") / "a b"
    shutil.copytree(library.prefix, prefix, symlinks=True)
    return prefix


def answer_of(program: Path) -> str:
    """Last line that the chat prints for the question, with the likeliest words."""
    done = subprocess.run(
        [program, POCKET, "0"], input=QUESTION, capture_output=True, text=True, check=False, env={}
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines(keepends=True)[-1]


def pkg_config(prefix: Path, *arguments: str) -> list[str]:
    environment = {"PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")}
    said = run([PKG_CONFIG, *arguments, "dsv4"], environment=environment)
    return [re.sub(r"\\(.)", r"\1", word) for word in re.findall(r"(?:\\.|\S)+", said)]


def configure(prefix: Path, project: Path, build: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CMAKE, "-S", project, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}"],
        capture_output=True,
        text=True,
        check=False,
        env=TOOLS,
    )


def finds(prefix: Path, folder: Path, asked: str) -> bool:
    """Whether find_package is content with the version."""
    project = folder / re.sub(r"\W", "_", asked or "any")
    project.mkdir()
    (project / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(p C)\n"
        f"find_package(dsv4 {asked})\nfind_package(dsv4 {asked})\n"
        "file(WRITE ${CMAKE_BINARY_DIR}/found ${dsv4_FOUND}${dsv4_VERSION})\n",
        encoding="utf-8",
    )
    done = configure(prefix, project, project / "build")
    assert done.returncode == 0, done.stderr
    found = (project / "build" / "found").read_text(encoding="utf-8")
    assert found in ("0", f"1{VERSION}")
    return found != "0"


def test_pkg_config_knows_the_version(library: Library) -> None:
    assert pkg_config(library.prefix, "--modversion") == [VERSION]


@pytest.mark.parametrize("is_moved", [False, True], ids=["built", "moved"])
def test_flags_of_pkg_config_build_the_example(
    library: Library, moved: Path, is_moved: bool, tmp_path: Path
) -> None:
    prefix = moved if is_moved else library.prefix
    flags = pkg_config(prefix, "--cflags", "--libs")
    program = tmp_path / "chat"
    run([*GCC, "-std=c99", *STRICT, str(EXAMPLES / "chat.c"), "-o", str(program), *flags])
    assert str(library.prefix) not in (" ".join(flags) if is_moved else "")
    assert answer_of(program) == ANSWER


@pytest.mark.parametrize("is_moved", [False, True], ids=["built", "moved"])
def test_cmake_builds_the_examples(
    library: Library, moved: Path, is_moved: bool, tmp_path: Path
) -> None:
    done = configure(moved if is_moved else library.prefix, EXAMPLES, tmp_path)
    assert done.returncode == 0, done.stderr
    run([CMAKE, "--build", str(tmp_path)], environment=TOOLS)
    assert answer_of(tmp_path / "chat") == ANSWER
    names = {"two_sessions", "chat_cpp"}
    assert all((tmp_path / name).is_file() for name in names)


@pytest.mark.parametrize(
    ("asked", "is_found"),
    [
        *[(asked, True) for asked in ("", VERSION, f"{VERSION} EXACT", "0.0.1")],
        *[(asked, False) for asked in ("0.0.1 EXACT", "0.99", "1", "99.0")],
    ],
)
def test_find_package_checks_the_version(
    library: Library, tmp_path: Path, asked: str, is_found: bool
) -> None:
    assert finds(library.prefix, tmp_path, asked) is is_found


def test_only_the_functions_of_the_header_are_exported(library: Library) -> None:
    header = (library.prefix / "include/dsv4.h").read_text(encoding="utf-8")
    declared = set(re.findall(r"^(?:int32_t|uint32_t|const char) \*?(dsv4_\w+)\(", header, re.M))
    said = run(["nm", "-D", "--defined-only", str(library.prefix / "lib/libdsv4.so.1")])
    assert {line.split()[-1] for line in said.splitlines()} == declared


def test_a_prefix_holds_both_headers_and_a_link(library: Library) -> None:
    names = {
        str(path.relative_to(library.prefix))
        for path in library.prefix.rglob("*")
        if not path.is_dir()
    }
    assert names == {
        *("include/dsv4.h", "include/dsv4.hpp", "lib/libdsv4.so", "lib/libdsv4.so.1"),
        *("lib/pkgconfig/dsv4.pc", "lib/cmake/dsv4/dsv4-config.cmake"),
        "lib/cmake/dsv4/dsv4-config-version.cmake",
    }
    assert (library.prefix / "lib/libdsv4.so").readlink() == Path("libdsv4.so.1")
