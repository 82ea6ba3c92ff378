"""Describes the SIGBUS guard and the reader to cffi; `setup.py` names the two builders."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

_HERE = Path(__file__).resolve().parent
_FOLDER = "edgedsv4/formats/native"  # relative to setup.py, as setuptools wants it


def _builder(module: str, header: str, sources: tuple[str, ...], libraries: tuple[str, ...]) -> FFI:
    builder = FFI()
    builder.cdef((_HERE / header).read_text(encoding="utf-8"))
    builder.set_source(
        f"edgedsv4.formats.native.{module}",
        f'#include <stddef.h>\n#include <stdint.h>\n#include "{header}"\n',
        sources=[f"{_FOLDER}/{name}" for name in sources],
        depends=[f"{_FOLDER}/{path.name}" for path in (*sorted(_HERE.glob("*.h")), Path(__file__))],
        include_dirs=[str(_HERE)],
        extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra"],
        extra_link_args=list(libraries),
    )
    return builder


ffibuilder = _builder("_sigbus", "sigbus.h", ("sigbus.c",), ())
reader_builder = _builder("_reader", "reader.h", ("reader.c", "ring.c"), ("-lpthread",))
