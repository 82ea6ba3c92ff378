"""Makes `reference.json` again: errors and some blocks of ggml's own quantizers.

usage (in a checkout, with PYTHONPATH=tests):
    python tests/data/quantize/make_reference.py LIBGGML_BASE.so VERSION
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from quantize_tensors import samples, weighted_error

TYPES = (Type.Q8_0, Type.MXFP4, Type.Q4_K, Type.Q6_K, Type.Q2_K)
KEPT_COLUMNS = 512


def encode(
    library: ctypes.CDLL, values: np.ndarray, kind: Type, weights: np.ndarray | None
) -> np.ndarray:
    """Bytes of ggml_quantize_chunk, uint8 [rows, row bytes]."""
    rows, columns = values.shape
    block, size = gguf.GGML_QUANT_SIZES[kind]
    result = np.zeros((rows, columns // block * size), dtype=np.uint8)
    function = library.ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    sizes = [ctypes.c_int64] * 3
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *sizes, ctypes.c_void_p]
    importance = None if weights is None else weights.ctypes.data
    source, target = values.ctypes.data, result.ctypes.data
    written = function(int(kind), source, target, 0, rows, columns, importance)
    if written != result.nbytes:
        raise SystemExit(f"{kind.name}: {written} bytes, expected {result.nbytes}")
    return result


def main(path: str, version: str) -> None:
    """Write the file beside this one."""
    library = ctypes.CDLL(path)
    errors: dict[str, dict[str, list[float]]] = {}
    blocks: dict[str, str] = {}
    for name, sample in samples().items():
        errors[name] = {}
        for kind in TYPES:
            plain = encode(library, sample.values, kind, None)
            weighted = encode(library, sample.values, kind, sample.importance)
            errors[name][kind.name] = [
                weighted_error(sample.values, gguf.quants.dequantize(plain, kind), None),
                weighted_error(
                    sample.values, gguf.quants.dequantize(weighted, kind), sample.importance
                ),
            ]
            if name == "student-t4":
                block, size = gguf.GGML_QUANT_SIZES[kind]
                blocks[kind.name] = plain[0, : KEPT_COLUMNS // block * size].tobytes().hex()
    record = {"source": version, "errors": errors, "student-t4 blocks": blocks}
    target = Path(__file__).with_name("reference.json")
    target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
