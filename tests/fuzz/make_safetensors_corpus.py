"""Write tests/fuzz/corpus/safetensors again: one small input per feature of the format.

    python tests/fuzz/make_safetensors_corpus.py

The first byte of an input is 0 for a weight file and 1 for the index of a directory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from raw_safetensors import entry, raw_file

CORPUS = Path(__file__).parent / "corpus" / "safetensors"

FILES = {
    "two_tensors": raw_file(
        {"b": entry("F32", [2, 3], 2, 26), "a": entry("U8", [2], 0, 2)}, bytes(26)
    ),
    "metadata": raw_file(
        {"__metadata__": {"format": "pt", "k": "ü\n"}, "a": entry("BF16", [], 0, 2)}, bytes(2)
    ),
    "fp8_and_scale": raw_file(
        {"w.weight": entry("F8_E4M3", [2, 2], 0, 4), "w.scale": entry("F8_E8M0", [1, 1], 4, 5)},
        bytes(5),
    ),
    "packed_fp4": raw_file(
        {"w": entry("F4", [2, 4], 0, 4), "x": entry("I8", [0, 7], 4, 4)}, bytes(4)
    ),
    "no_tensors": raw_file(b"{}"),
    "escapes": raw_file(
        b'{"\\u0061\\ud83d\\ude00":' + json.dumps(entry("BOOL", [1], 0, 1)).encode() + b"} ", b"x"
    ),
}
INDEXES = {
    "index": {"metadata": {"total_size": 1}, "weight_map": {"a": "a.safetensors"}},
    "index_outside": {"weight_map": {"a": "../a.safetensors"}},
}

if __name__ == "__main__":
    for name, data in FILES.items():
        (CORPUS / name).write_bytes(b"\0" + data)
    for name, index in INDEXES.items():
        (CORPUS / name).write_bytes(b"\1" + json.dumps(index).encode())
