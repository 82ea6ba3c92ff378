"""Write edgedsv4/kernels/data/iq_grids.npz again, from the tables of `gguf` (0.19, MIT).

    python tests/data/make_iq_grids.py [OUTPUT]

The IQ types store indices into fixed tables ("grids") of 4 or 8 small values, which fit in signed
bytes. Two runs give the same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from gguf import quants

# IQ1_M uses IQ1_S's grid.
GRID_TYPES = ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
STORED = Path(__file__).parents[2] / "edgedsv4" / "kernels" / "data" / "iq_grids.npz"


def iq_grids() -> dict[str, np.ndarray]:
    """Grid of each type by its name, int8, [entries, 4 or 8]."""
    grids = {}
    for name in GRID_TYPES:
        quant = getattr(quants, name)
        quant.init_grid()
        values = quant.grid.reshape(quant.grid_shape)
        grids[name] = values.astype(np.int8)
        if not np.array_equal(grids[name], values):
            raise ValueError(f"the grid of {name} does not fit in signed bytes")
    return grids


if __name__ == "__main__":
    np.savez_compressed(Path(sys.argv[1]) if len(sys.argv) > 1 else STORED, **iq_grids())
