"""Describes the kernels to cffi; `setup.py` names `ffibuilder` in `cffi_modules`.

Every C file of this folder belongs to the extension, and `kernels.h` is its interface, word for
word. After editing, `python setup.py build_ext --inplace` compiles what changed.
"""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

_HERE = Path(__file__).resolve().parent
_HEADER = (_HERE / "kernels.h").read_text(encoding="utf-8")

_FILES = sorted(path.name for path in _HERE.glob("*.c"))
_DEPENDS = sorted(path.name for path in (*_HERE.glob("*.h"), Path(__file__)))

ffibuilder = FFI()
ffibuilder.cdef(_HEADER)
# Asked by dk_parallel every now and then; `library.py` defines it.
ffibuilder.cdef('extern "Python" int dk_ask_python(void *data);')
ffibuilder.set_source(
    "edgedsv4.kernels.native._kernels",
    '#include "native.h"\n',
    # Relative to setup.py, as setuptools wants it.
    sources=[f"edgedsv4/kernels/native/{name}" for name in _FILES],
    depends=[f"edgedsv4/kernels/native/{name}" for name in _DEPENDS],
    include_dirs=[str(_HERE)],
    # Products and sums are fused where a file says so, not where a compiler likes: scalar results
    # are the same everywhere.
    extra_compile_args=[
        "-std=gnu11",
        "-O3",
        "-fno-math-errno",
        "-ffp-contract=off",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Wno-psabi",
        # Warnings are errors in the tests alone: a newer compiler's must not stop an installation.
    ],
    extra_link_args=["-lpthread", "-lm"],
)
