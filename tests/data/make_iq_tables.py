"""Write edgedsv4/kernels/native/iq_grids.c again, from edgedsv4/kernels/data/iq_grids.npz.

    python tests/data/make_iq_tables.py [OUTPUT]

The same grids as the Python decoders use, as C arrays: one integer per entry, whose bytes from the
lowest up are the values of the entry. Two runs give the same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

KERNELS = Path(__file__).parents[2] / "edgedsv4" / "kernels"
STORED = KERNELS / "native" / "iq_grids.c"
LINE_LENGTH = 110
HEADING = """\
/* The grids of the IQ block types: the values of an entry are the bytes of a number, lowest first.
 *
 * Written by tests/data/make_iq_tables.py from kernels/data/iq_grids.npz; a test compares the two.
 * Source: ggml (MIT licence), see the README of that folder.
 * house-rule: long file, because it is a table. */

#include "iq_fields.h"
"""


def table(name: str, grid: np.ndarray) -> str:
    """One C array of int8 values [entries, 4 or 8]."""
    bits = 8 * grid.shape[1]
    entries = [f"0x{entry:0{bits // 4}x}," for entry in grid.view(f"<u{bits // 8}")[:, 0].tolist()]
    per_line = (LINE_LENGTH - 4 + 1) // (len(entries[0]) + 1)
    lines = (entries[i : i + per_line] for i in range(0, len(entries), per_line))
    body = "\n".join("    " + " ".join(line) for line in lines)
    return f"\nconst uint{bits}_t dk_grid_{name.lower()}[{len(entries)}] = {{\n{body}\n}};\n"


def code_table(grid: np.ndarray) -> str:
    """The grid of IQ2_XXS in two bits per value: a byte for four values, first ones first."""
    codes = np.searchsorted(np.unique(grid), grid).astype(np.uint8).reshape(-1, 2, 4)
    packed = (codes << np.uint8([0, 2, 4, 6])).sum(axis=2, dtype=np.uint8).T.ravel()
    entries = [f"0x{byte:02x}," for byte in packed.tolist()]
    body = "\n".join("    " + " ".join(entries[i : i + 16]) for i in range(0, len(entries), 16))
    return f"\nconst uint8_t dk_codes_iq2_xxs[{len(entries)}] = {{\n{body}\n}};\n"


def iq_tables() -> str:
    """The whole C file."""
    with np.load(KERNELS / "data" / "iq_grids.npz", allow_pickle=False) as grids:
        tables = "".join(table(name, grids[name]) for name in sorted(grids))
        return HEADING + tables + code_table(grids["IQ2_XXS"])


if __name__ == "__main__":
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else STORED
    output.write_text(iq_tables(), encoding="utf-8")
