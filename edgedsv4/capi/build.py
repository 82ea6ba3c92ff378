"""Builds libdsv4 for this machine: `python -m edgedsv4.capi.build --out DIR`.

DIR becomes a prefix to compile against: `lib/libdsv4.so`, `include/dsv4.h`, and what pkg-config and
CMake look for. The library is made here and not shipped in the wheel, because it is bound to one
libpython and to the Python whose packages it loads.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from edgedsv4 import __version__
from edgedsv4.capi.header import Function, Header, read_header, table_declaration
from edgedsv4.errors import Dsv4Error

_SONAME = "libdsv4.so.1"

_PKG_CONFIG = """prefix=${{pcfiledir}}/../..
libdir=${{prefix}}/lib
includedir=${{prefix}}/include

Name: dsv4
Description: DeepSeek-V4 on one machine
URL: https://pypi.org/project/edgedsv4/
Version: {version}
Libs: -L${{libdir}} -ldsv4 -Wl,-rpath,${{libdir}}
Cflags: -I${{includedir}}
"""

_CMAKE_CONFIG = """# find_package(dsv4) gives the target dsv4::dsv4.
get_filename_component(_dsv4_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET dsv4::dsv4)
  add_library(dsv4::dsv4 SHARED IMPORTED)
  set_target_properties(dsv4::dsv4 PROPERTIES
    IMPORTED_LOCATION "${_dsv4_prefix}/lib/libdsv4.so.1"
    IMPORTED_SONAME "libdsv4.so.1"
    INTERFACE_INCLUDE_DIRECTORIES "${_dsv4_prefix}/include")
endif()
unset(_dsv4_prefix)
"""

_CMAKE_VERSION = """# For whoever asks for this version, or an older one of the same major number.
set(PACKAGE_VERSION "{version}")
set(PACKAGE_VERSION_COMPATIBLE TRUE)
if(PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION
   OR (PACKAGE_FIND_VERSION_COUNT GREATER 0 AND NOT PACKAGE_FIND_VERSION_MAJOR EQUAL {major}))
  set(PACKAGE_VERSION_COMPATIBLE FALSE)
elseif(PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
if(NOT CMAKE_SIZEOF_VOID_P STREQUAL "" AND NOT CMAKE_SIZEOF_VOID_P EQUAL 8)
  set(PACKAGE_VERSION_UNSUITABLE TRUE)
endif()
"""


class BuildError(Dsv4Error):
    """The library cannot be built here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How to build."""

    out: Path
    """Prefix to install into; made if it is not there."""
    python: Path
    """The Python that the library will run; its packages must hold edgedsv4."""
    compiler: tuple[str, ...]
    """C compiler and its first arguments."""


def build(options: BuildOptions) -> Path:
    """Build and install; files of an earlier build are replaced one by one, each at once.

    Returns:
        The library.

    Raises:
        BuildError: no shared libpython, no headers, no compiler, the compiler failed, or the
            Python to run has no edgedsv4.
    """
    header = read_header()
    _check_python(options.python)
    library = options.out / "lib" / _SONAME
    for folder in (library.parent / "pkgconfig", library.parent / "cmake" / "dsv4"):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        work = Path(scratch)
        (work / "libdsv4.c").write_text(library_source(header), encoding="utf-8")
        (work / "exports").write_text("{ global: dsv4_*; local: *; };\n", encoding="utf-8")
        _compile(options, header, work)
        Path(work / _SONAME).replace(library)
        link = work / "libdsv4.so"
        link.symlink_to(_SONAME)
        link.replace(library.parent / "libdsv4.so")
        _write_support(options.out, header, work)
    return library


def library_source(header: Header) -> str:
    """C of the library: `shim.c`, the table behind its includes, the functions at its end."""
    shim = Path(__file__).with_name("shim.c").read_text(encoding="utf-8")
    include = '#include "shim.h"\n'
    before, after = shim.split(include)
    functions = "\n".join(map(_forwarding, header.functions))
    return f"{before}{include}\n{table_declaration(header)}{after}\n{functions}"


def _forwarding(function: Function) -> str:
    member = function.name.removeprefix("dsv4_")
    # Where Python does not run, the handle is promised to be NULL all the same.
    makes_handle = re.search(r"\*\*out$", function.parameters)
    clearing = "    if (status && out)\n        *out = NULL;\n" if makes_handle else ""
    return (
        f"int32_t {function.name}({function.parameters})\n{{\n"
        "    host_thread host;\n    enter(&host);\n"
        f"    int32_t status = start(NULL, __func__);\n{clearing}"
        f"    if (!status)\n        status = table->{member}({function.arguments});\n"
        "    leave(&host);\n    return status;\n}\n"
    )


def _compile(options: BuildOptions, header: Header, work: Path) -> None:
    libpython = _libpython()
    command = [
        *options.compiler,
        *("-std=c11", "-O2", "-g", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
        f"-DDSV4_DEFAULT_PYTHON={_c_string(str(options.python))}",
        f"-DDSV4_PACKAGE_VERSION={_c_string(__version__)}",
        f"-I{header.path.parent}",
        f"-I{Path(__file__).parent}",
        f"-I{sysconfig.get_path('include')}",
        str(work / "libdsv4.c"),
        *("-o", str(work / _SONAME)),
        str(libpython),
        # -Xlinker takes a path with commas as it is.
        *("-Xlinker", "-rpath", "-Xlinker", str(libpython.parent)),
        *("-Xlinker", f"--version-script={work / 'exports'}"),
        f"-Wl,-soname,{_SONAME}",
        # Loaded again after dlclose, it could not start an interpreter beside its first one.
        *("-Wl,-z,nodelete", "-lpthread", "-ldl", "-lm"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BuildError(
            f"no C compiler {options.compiler[0]!r} found: install gcc or clang, or name one with"
            " --cc"
        ) from None
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")


def _check_python(python: Path) -> None:
    """Refuse a Python that the library could not run: it is asked the way the library starts it."""
    code = "import sys, edgedsv4.capi._entry; print(sys.version)"
    try:
        done = subprocess.run(
            [python, "-I", "-c", code], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise BuildError(f"{python} cannot be run: {error.strerror}") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BuildError(
            f"{python} does not find edgedsv4 by itself ({reason}); install it there with pip, not"
            " with --user nor through PYTHONPATH, or name another Python with --python"
        )
    if done.stdout.strip() != sys.version:
        raise BuildError(
            f"{python} is Python {done.stdout.split()[0]}, the build runs in"
            f" {sys.version.split()[0]} of another build; run it with the Python that the library"
            " is to run"
        )


def _c_string(text: str) -> str:
    """A text as a literal of C."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _libpython() -> Path:
    """The shared library of this Python."""
    variables = sysconfig.get_config_vars()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not variables.get("Py_ENABLE_SHARED"):
        raise BuildError(
            f"{sys.executable} was built without a shared libpython{version}, which a C library"
            " needs; use a Python that has one: your distribution's (with its -dev package), or one"
            " built with --enable-shared"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise BuildError(
            f"{sysconfig.get_path('include')}/Python.h is missing; install the headers of Python"
            f" {version} (python3-dev)"
        )
    folders = [Path(str(variables[name])) for name in ("LIBDIR", "LIBPL") if variables.get(name)]
    name = str(variables.get("INSTSONAME") or f"libpython{version}.so.1.0")
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    raise BuildError(f"{name} is in none of {', '.join(map(str, folders))}; reinstall Python")


def _write_support(out: Path, header: Header, work: Path) -> None:
    """Headers, pkg-config and CMake files, each replaced at once."""
    numbers = ".".join(part for part in __version__.split(".")[:3] if part.isdigit())
    include = out / "include"
    include.mkdir(exist_ok=True)
    texts = {
        include / "dsv4.h": header.path.read_text(encoding="utf-8"),
        out / "lib/pkgconfig/dsv4.pc": _PKG_CONFIG.format(version=numbers),
        out / "lib/cmake/dsv4/dsv4-config.cmake": _CMAKE_CONFIG,
        out / "lib/cmake/dsv4/dsv4-config-version.cmake": _CMAKE_VERSION.format(
            version=numbers, major=numbers.split(".")[0]
        ),
    }
    wrapper = header.path.with_name("dsv4.hpp")
    if wrapper.is_file():
        texts[include / "dsv4.hpp"] = wrapper.read_text(encoding="utf-8")
    for path, text in texts.items():
        part = work / path.name
        part.write_text(text, encoding="utf-8")
        part.replace(path)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m edgedsv4.capi.build",
        description="Build libdsv4, with header, pkg-config and CMake files, for this machine.",
    )
    parser.add_argument("--out", type=Path, required=True, help="prefix to install into")
    parser.add_argument(
        "--python",
        type=Path,
        default=Path(sys.executable),
        help="the Python that the library runs, with edgedsv4 installed (default: this one)",
    )
    parser.add_argument("--cc", default=None, help="C compiler (default: cc, gcc or clang)")
    chosen = parser.parse_args(arguments)
    found = [name for name in ("cc", "gcc", "clang") if shutil.which(name)]
    compiler = tuple(shlex.split(chosen.cc)) if chosen.cc else (found[0] if found else "cc",)
    try:
        library = build(
            # Not resolved: a virtual environment's python is a link, and its place means something.
            BuildOptions(chosen.out.resolve(), chosen.python.absolute(), compiler)
        )
    except (BuildError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{library}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
