"""Tiles of a stored matrix as f32, from its planes: what every kernel with weights calls.

Planes are described in `edgedsv4.kernels.gpu.planes`. The values equal those of
`edgedsv4.kernels.dequantize` bit for bit.
"""

from __future__ import annotations

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.decode_iq import iq2_xs, iq2_xxs, iq3_xxs, iq4_xs
from edgedsv4.kernels.gpu.decode_k import q2_k, q3_k, q4_k, q5_k, q6_k
from edgedsv4.kernels.gpu.decode_small import floats, fp8, mxfp4, nvfp4, q4_0, q8_0


# One branch per type; the compiler keeps one of them.
@triton.jit
def decode_tile(  # noqa: C901, PLR0911, PLR0912
    p0,
    p1,
    p2,
    p3,
    row,
    row_mask,
    k0,
    K,
    TYPE: tl.constexpr,
    BK: tl.constexpr,
    SCALE_COLS: tl.constexpr,
):
    """Columns k0 .. k0 + BK - 1 of some rows: f32 [BN, BK], zero outside of the matrix.

    row int64 [BN]; row_mask bool [BN], or None if all rows exist; k0 a multiple of BK, BK a power
    of two and at least 64, for types of 256-element blocks at least 256. With K a constexpr, masks
    that it makes needless fall away. Fast with 32 columns of a row or more for every thread.
    """
    if TYPE == "F32" or TYPE == "F16" or TYPE == "BF16":  # noqa: PLR1714
        return floats(p0, row, row_mask, k0, K, TYPE, BK)
    elif TYPE == "Q8_0":
        return q8_0(p0, p1, row, row_mask, k0, K, BK)
    elif TYPE == "Q4_0":
        return q4_0(p0, p1, row, row_mask, k0, K, BK)
    elif TYPE == "MXFP4":
        return mxfp4(p0, p1, row, row_mask, k0, K, BK)
    elif TYPE == "NVFP4":
        return nvfp4(p0, p1, p2, row, row_mask, k0, K, BK)
    elif TYPE == "FP8_E4M3":
        return fp8(p0, p1, row, row_mask, k0, K, BK, SCALE_COLS)
    elif TYPE == "Q2_K":
        return q2_k(p0, p1, p2, row, row_mask, k0, K, BK)
    elif TYPE == "Q3_K":
        return q3_k(p0, p1, p2, p3, row, row_mask, k0, K, BK)
    elif TYPE == "Q4_K":
        return q4_k(p0, p1, row, row_mask, k0, K, BK)
    elif TYPE == "Q5_K":
        return q5_k(p0, p1, p2, row, row_mask, k0, K, BK)
    elif TYPE == "Q6_K":
        return q6_k(p0, p1, p2, p3, row, row_mask, k0, K, BK)
    elif TYPE == "IQ2_XXS":
        return iq2_xxs(p0, p1, p2, p3, row, row_mask, k0, K, BK)
    elif TYPE == "IQ2_XS":
        return iq2_xs(p0, p1, p2, p3, row, row_mask, k0, K, BK)
    elif TYPE == "IQ3_XXS":
        return iq3_xxs(p0, p1, p2, p3, row, row_mask, k0, K, BK)
    elif TYPE == "IQ4_XS":
        return iq4_xs(p0, p1, p2, p3, row, row_mask, k0, K, BK)
    else:
        tl.static_assert(False, "decode_tile: unknown type")
        return None
