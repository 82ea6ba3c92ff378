"""Builds `_entry`, the extension module whose functions are written in Python and called from C."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from cffi import FFI

_HERE = Path(__file__).resolve().parent


def _header_module() -> ModuleType:
    """`header.py`, by its path: setup.py runs this file without the package."""
    spec = importlib.util.spec_from_file_location("dsv4_header", _HERE / "header.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{_HERE / 'header.py'} is missing")
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by its name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_header = _header_module()
HEADER = _header.read_header()
FUNCTIONS = HEADER.functions

_callbacks = (_HERE / "callbacks.h").read_text(encoding="utf-8")
# The head of every function there, `static` left out.
_HELPERS = re.findall(r"^static (\w[^;{=]*\))$", _callbacks, re.MULTILINE)
_PROTOTYPES = "\n".join(f"static int32_t py_{f.name}({f.parameters});" for f in FUNCTIONS)
_ENTRIES = ", ".join(f"py_{f.name}" for f in FUNCTIONS)

ffibuilder = FFI()
ffibuilder.cdef(HEADER.declarations)
ffibuilder.cdef("\n".join(f"{helper};" for helper in _HELPERS))
for function in FUNCTIONS:
    ffibuilder.cdef(f'extern "Python" int32_t py_{function.name}({function.parameters});')
ffibuilder.set_source(
    "edgedsv4.capi._entry",
    f"""#include "dsv4.h"
{_header.table_declaration(HEADER)}
{_PROTOTYPES}
static const dsv4_table entries = {{{_ENTRIES}}};
#include "callbacks.h"
""",
    include_dirs=[str(HEADER.path.parent), str(_HERE)],
    depends=[str(HEADER.path), "edgedsv4/capi/shim.h", "edgedsv4/capi/callbacks.h"],
    extra_compile_args=["-std=gnu11", "-fvisibility=hidden"],
    libraries=["m"],
)
