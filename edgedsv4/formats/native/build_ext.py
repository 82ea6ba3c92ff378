"""Describes the SIGBUS guard to cffi; `setup.py` names `ffibuilder` in `cffi_modules`."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

_HERE = Path(__file__).resolve().parent

ffibuilder = FFI()
ffibuilder.cdef((_HERE / "sigbus.h").read_text(encoding="utf-8"))
ffibuilder.set_source(
    "edgedsv4.formats.native._sigbus",
    '#include <stddef.h>\n#include <stdint.h>\n#include "sigbus.h"\n',
    # Relative to setup.py, as setuptools wants it.
    sources=["edgedsv4/formats/native/sigbus.c"],
    depends=["edgedsv4/formats/native/sigbus.h", "edgedsv4/formats/native/build_ext.py"],
    include_dirs=[str(_HERE)],
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra"],
)
