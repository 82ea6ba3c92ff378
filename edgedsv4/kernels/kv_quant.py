"""Storage formats of cached rows: FP8 key/value rows and FP4 index keys.

Both start from the row rounded to bfloat16. A key/value row keeps its last r (rotated) dims in
bfloat16 and the others in groups of 64: s = 2^ceil(log2(max(amax, 1e-4) / 448)), code = e4m3(x /
s). An index key is coded in groups of 32: s = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)), code =
e2m1(x / s), ties to the even code. A last group may be shorter. Scale bytes are E8M0 (2^(byte -
127)). The model was trained with these roundings, so storing the codes loses nothing.
Source: DeepSeek-V4 reference code; the 576 + 8 byte row is that of FlashMLA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgedsv4.kernels.dequantize.float_blocks import e8m0, fp4_e2m1, fp8_e4m3
from edgedsv4.kernels.dispatch import resolve_backend
from edgedsv4.kernels.native.library import available_on, library, pointer, run_here

if TYPE_CHECKING:
    from edgedsv4.config import Backend
    from edgedsv4.kernels.dispatch import Implementation

FP8_GROUP = 64
FP4_GROUP = 32
FP8_MAX = 448.0
FP4_MAX = 6.0
_FP8, _FP4 = 1, 2  # formats of dk_rows
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def fp8_scale_bytes(nope_dim: int) -> int:
    """Scale bytes of a key/value row: one per group, padded to a multiple of 8 (448: 7 + 1)."""
    return -(-_groups(nope_dim, FP8_GROUP) // 8) * 8


def quantize_kv_rows(
    rows: Tensor, rope_dim: int, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Encode key/value rows.

    Args:
        rows: [N, d], rotated, any float dtype.
        rope_dim: r, last dims kept in bfloat16.
        backend: which implementation; all give the same bytes.

    Returns:
        data uint8 [N, (d - r) + 2 r] (e4m3 codes, then little-endian bfloat16) and scales uint8
        [N, fp8_scale_bytes(d - r)].
    """
    if _resolve(rows, backend) == "native":
        nope_dim = rows.shape[1] - rope_dim
        widths = (nope_dim + 2 * rope_dim, fp8_scale_bytes(nope_dim))
        return _encode_native(rows, _FP8, rope_dim, widths)
    rounded = rows.to(torch.bfloat16)
    nope_dim = rows.shape[-1] - rope_dim
    exponents, scaled = _scaled_groups(rounded[:, :nope_dim], FP8_GROUP, FP8_MAX, 1e-4)
    codes = scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    tail = rounded[:, nope_dim:].contiguous().view(torch.uint8).view(rows.shape[0], 2 * rope_dim)
    scales = exponents.new_zeros((rows.shape[0], fp8_scale_bytes(nope_dim)))
    scales[:, : exponents.shape[1]] = exponents
    return torch.cat((codes, tail), dim=-1), scales


def dequantize_kv_rows(
    data: Tensor,
    scales: Tensor,
    rope_dim: int,
    dtype: torch.dtype,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Decode key/value rows.

    Args:
        data: codes, as `quantize_kv_rows` returns them.
        scales: their scale bytes.
        rope_dim: r.
        dtype: of the result; bfloat16 and wider hold the values exactly.
        backend: which implementation; all give the same values.

    Returns:
        [N, d].
    """
    nope_dim = data.shape[-1] - 2 * rope_dim
    if _resolve(data, backend, dtype) == "native":
        return _decode_native(data, scales, _FP8, rope_dim, nope_dim + rope_dim)
    factors = e8m0(scales[:, : _groups(nope_dim, FP8_GROUP)])
    nope = fp8_e4m3(data[:, :nope_dim]) * factors.repeat_interleave(FP8_GROUP, dim=-1)[:, :nope_dim]
    tail = data[:, nope_dim:].contiguous().view(torch.bfloat16)
    return torch.cat((nope.to(dtype), tail.to(dtype)), dim=-1)


def quantize_index_keys(keys: Tensor, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """Encode index keys (or queries).

    Args:
        keys: [N, n], n even, already Hadamard transformed, any float dtype.
        backend: which implementation; all give the same bytes.

    Returns:
        codes uint8 [N, n / 2] (element 2i in the low nibble) and scales uint8 [N, ceil(n / 32)].
    """
    if _resolve(keys, backend) == "native":
        widths = (keys.shape[1] // 2, _groups(keys.shape[1], FP4_GROUP))
        return _encode_native(keys, _FP4, 0, widths)
    exponents, scaled = _scaled_groups(keys.to(torch.bfloat16), FP4_GROUP, FP4_MAX, 6 * 2.0**-126)
    magnitude = scaled.abs().clamp(max=FP4_MAX)
    midpoints = torch.tensor(_E2M1_MIDPOINTS, device=keys.device)
    # Between codes c and c + 1 the tie goes to the even one: up from odd c, down from even c.
    above = torch.bucketize(magnitude, midpoints, right=False)
    at_or_above = torch.bucketize(magnitude, midpoints, right=True)
    code = torch.where(above % 2 == 1, at_or_above, above)
    code = (code | (torch.signbit(scaled).to(code.dtype) << 3)).to(torch.uint8)
    return code[:, 0::2] | (code[:, 1::2] << 4), exponents


def dequantize_index_keys(
    codes: Tensor, scales: Tensor, dtype: torch.dtype, *, backend: Backend = "auto"
) -> Tensor:
    """Decode index keys.

    Args:
        codes: as `quantize_index_keys` returns them.
        scales: their scale bytes.
        dtype: of the result.
        backend: which implementation; all give the same values.

    Returns:
        [N, n].
    """
    if _resolve(codes, backend, dtype) == "native":
        return _decode_native(codes, scales, _FP4, 0, 2 * codes.shape[1])
    values = fp4_e2m1(codes)
    factors = e8m0(scales).repeat_interleave(FP4_GROUP, dim=-1)[:, : values.shape[-1]]
    return (values * factors).to(dtype)


def _groups(width: int, group: int) -> int:
    return -(-width // group)


def _scaled_groups(
    rows: Tensor, group: int, code_max: float, floor: float
) -> tuple[Tensor, Tensor]:
    """Scale bytes [N, groups] and the rows divided by their group's scale, float32 [N, width]."""
    count, width = rows.shape
    groups = _groups(width, group)
    padded = rows.new_zeros((count, groups * group), dtype=torch.float32)
    padded[:, :width] = rows
    blocks = padded.view(count, groups, group)
    ratio = blocks.abs().amax(dim=-1).clamp(min=floor) / code_max
    mantissa, exponent = torch.frexp(ratio)  # ratio = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = (exponent - (mantissa == 0.5).to(exponent.dtype)).clamp(-127, 127)
    scaled = torch.ldexp(blocks, -exponent[..., None])
    return (exponent + 127).to(torch.uint8), scaled.view(count, groups * group)[:, :width]


def _resolve(rows: Tensor, backend: Backend, dtype: torch.dtype = torch.float32) -> Implementation:
    """What encodes `rows`, or decodes codes to `dtype`: C has only float32 on the CPU."""
    floats = rows if rows.is_floating_point() else torch.empty(0, dtype=dtype, device=rows.device)
    return resolve_backend(backend, available_on(floats), operation="kv_quant")


def _stored(data: Tensor, scales: Tensor, layout: tuple[int, int, int]) -> Any:
    """`dk_rows *` of encoded rows; layout is format, width, rope dims."""
    _, ffi = library()
    rows = ffi.new("dk_rows *")
    rows.data, rows.data_stride = pointer(data), data.shape[1]
    rows.scales, rows.scale_stride = pointer(scales), scales.shape[1]
    rows.format, rows.width, rows.rope = layout
    return rows


def _encode_native(
    rows: Tensor, kind: int, rope_dim: int, widths: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    lib, _ = library()
    run, rows, count = run_here(), rows.contiguous(), rows.shape[0]
    data, scales = (torch.empty((count, width), dtype=torch.uint8) for width in widths)
    stored = _stored(data, scales, (kind, rows.shape[1], rope_dim))
    run.check(lib.dk_rows_store(run.cdata, stored, 0, pointer(rows), count))
    return data, scales


def _decode_native(data: Tensor, scales: Tensor, kind: int, rope_dim: int, width: int) -> Tensor:
    lib, _ = library()
    data, scales = data.contiguous(), scales.contiguous()
    rows = torch.empty((data.shape[0], width), dtype=torch.float32)
    lib.dk_rows_load(
        pointer(rows), _stored(data, scales, (kind, width, rope_dim)), 0, rows.shape[0]
    )
    return rows
