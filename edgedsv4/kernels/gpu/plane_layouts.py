"""Blocks of a GGUF file taken apart into planes, per type.

Every plane holds whole numbers per group of columns; bits above the lowest 4 or 2 are in planes of
their own. Elements of 8 bits are in order. Of smaller ones a word holds the even ones in its lower
and the odd ones in its upper half, each half a little-endian stream of bits: a mask then leaves two
neighbours, 16 bits apart, which a kernel reads as two half floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.dequantize.fields import as_type, bit_planes, look_up, nibbles
from edgedsv4.kernels.dequantize.tables import iq4_values, iq_grid


@dataclass(frozen=True, slots=True)
class Plane:
    """One field: `numbers` of `dtype` for every `columns` columns."""

    dtype: torch.dtype
    columns: int
    numbers: int = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """The planes of a type, and the function that makes them of blocks uint8 [n, block_bytes]."""

    planes: tuple[Plane, ...]
    split: Callable[[Tensor], tuple[Tensor, ...]]


def split_blocks(name: str, rows: Tensor) -> list[Tensor]:
    """Planes of raw rows: uint8 [n, row_bytes] -> one tensor [n, ...] per plane of the layout."""
    layout = LAYOUTS[name]
    fields = layout.split(rows.reshape(-1, BLOCK_TYPES[name].block_bytes))
    return [
        part.contiguous().view(plane.dtype).view(len(rows), -1)
        for part, plane in zip(fields, layout.planes, strict=True)
    ]


@cache
def table_of(name: str, device: torch.device) -> Tensor | None:
    """The look-up table that goes with the planes of a type, if there is one; one per device.

    Half floats in whole words: IQ2 int64 [entries, 2], IQ3 int64 [entries], IQ4 int32 [256], the
    two values that a byte of codes stands for.
    """
    cpu = torch.device("cpu")
    if name in ("IQ2_XXS", "IQ2_XS", "IQ3_XXS"):
        words: Tensor = iq_grid(name, cpu).half().view(torch.int64).squeeze(1)
        return words.to(device)
    if name == "IQ4_XS":
        byte = torch.arange(256)
        values = iq4_values(cpu)
        pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=1)
        table: Tensor = pairs.half().view(torch.int32).squeeze(1)
        return table.to(device)
    return None


def _in_halves(codes: Tensor, per_word: int) -> Tensor:
    """Codes [n, e] with the even ones of each word before its odd ones."""
    pairs: Tensor = codes.unflatten(1, (-1, per_word // 2, 2))
    return pairs.transpose(2, 3).flatten(1)


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Codes [n, e] of 4 bits, two per byte, the first one in the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _pack_twos(codes: Tensor) -> Tensor:
    """Codes [n, e] of 2 bits, four per byte."""
    return codes[:, 0::4] | (codes[:, 1::4] << 2) | (codes[:, 2::4] << 4) | (codes[:, 3::4] << 6)


def _pack_bits(bits: Tensor) -> Tensor:
    """Bits [n, e], eight per byte."""
    return _pack_twos(bits[:, 0::2] | (bits[:, 1::2] << 1))


def pack_e2m1(codes: Tensor) -> Tensor:
    """4-bit floats [n, e] uint8 in order -> int32 [n, e / 8], as `decode_small.e2m1_tile` wants.

    Of the four in a half, the magnitudes are at bits 9, 6, 3, 0 and the signs at 15, 12, 13, 14.
    """
    code = codes.unflatten(1, (-1, 4, 2)).to(torch.int16)  # [n, words, 4, half]
    magnitude, sign = code & 7, code >> 3
    lanes = torch.zeros_like(code[:, :, 0])
    for r, (low, top) in enumerate(((9, 15), (6, 12), (3, 13), (0, 14))):
        lanes |= (magnitude[:, :, r] << low) | (sign[:, :, r] << top)
    return lanes.contiguous().view(torch.int32).squeeze(2)


def e2m1_words(packed: Tensor) -> Tensor:
    """4-bit floats as official checkpoints have them, low nibble first: uint8 [n, b] -> int32."""
    codes = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
    return pack_e2m1(codes)


def _q8_0(data: Tensor) -> tuple[Tensor, ...]:
    """Codes with 128 added, so that a byte is an unsigned number; d."""
    return data[:, 2:] ^ 0x80, data[:, :2]


def _q4_0(data: Tensor) -> tuple[Tensor, ...]:
    return _pack_nibbles(_in_halves(nibbles(data[:, 2:]), 8)), data[:, :2]


def _mxfp4(data: Tensor) -> tuple[Tensor, ...]:
    return pack_e2m1(nibbles(data[:, 1:])), data[:, :1]


def _nvfp4(data: Tensor) -> tuple[Tensor, ...]:
    return pack_e2m1(bit_planes(data[:, 4:], (0, 4), 15, 8).flatten(1)), data[:, :4]


def _q2_k(data: Tensor) -> tuple[Tensor, ...]:
    """Codes; s and m of a sub-block in one byte; d and dmin."""
    codes = bit_planes(data[:, 16:80], (0, 2, 4, 6), 3, 32).flatten(1)
    return _pack_twos(_in_halves(codes, 16)), data[:, :16], data[:, 80:]


def _q3_k(data: Tensor) -> tuple[Tensor, ...]:
    """Codes; third bits; scales: low nibbles in order, then upper two bits in order; d."""
    codes = bit_planes(data[:, 32:96], (0, 2, 4, 6), 3, 32).flatten(1)
    third = bit_planes(data[:, :32], range(8), 1, 32).flatten(1)
    low = torch.cat((data[:, 96:104] & 15, data[:, 96:104] >> 4), dim=1)
    high = torch.cat([(data[:, 104:108] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    scales = torch.cat((_pack_nibbles(low), _pack_twos(high)), dim=1)
    return (
        _pack_twos(_in_halves(codes, 16)),
        _pack_bits(_in_halves(third, 16)),
        scales,
        data[:, 108:],
    )


def _header(data: Tensor) -> Tensor:
    """First 16 bytes of Q4_K and Q5_K in words: d, dmin; low nibbles of s; of m; upper bits."""
    first, second, third = data[:, 4:16].split(4, dim=1)
    s = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    m = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    parts = (_pack_nibbles(s & 15), _pack_nibbles(m & 15), _pack_twos(s >> 4), _pack_twos(m >> 4))
    return torch.cat((data[:, :4], *parts), dim=1)


def _q4_k(data: Tensor) -> tuple[Tensor, ...]:
    codes = bit_planes(data[:, 16:], (0, 4), 15, 32).flatten(1)
    return _pack_nibbles(_in_halves(codes, 8)), _header(data)


def _q5_k(data: Tensor) -> tuple[Tensor, ...]:
    codes = bit_planes(data[:, 48:], (0, 4), 15, 32).flatten(1)
    fifth = bit_planes(data[:, 16:48], range(8), 1, 32).flatten(1)
    return _pack_nibbles(_in_halves(codes, 8)), _pack_bits(_in_halves(fifth, 8)), _header(data)


def _q6_k(data: Tensor) -> tuple[Tensor, ...]:
    low = bit_planes(data[:, :128], (0, 4), 15, 64).flatten(1)
    high = bit_planes(data[:, 128:192], (0, 2, 4, 6), 3, 32).flatten(1)
    low, high = _in_halves(low, 8), _in_halves(high, 8)
    return _pack_nibbles(low), _pack_twos(high), data[:, 192:208], data[:, 208:]


@cache
def _sign_places(device: torch.device) -> Tensor:
    """Seven signs at the places of octet 0, bit i at 4 (i / 2) + 16 (i mod 2): int32 [128]."""
    stored = torch.arange(128, dtype=torch.int32)
    bits = [((stored >> i) & 1) << (4 * (i // 2) + 16 * (i % 2)) for i in range(7)]
    return torch.stack(bits).sum(0, dtype=torch.int32).to(device)


def _spread_signs(words: Tensor) -> Tensor:
    """Words of four times seven signs and a scale (top four bits), the signs moved apart.

    Sign i of octet o goes from bit 7 o + i to bit 4 (i / 2) + o + 16 (i mod 2).
    """
    places = _sign_places(words.device)
    moved = words & -(1 << 28)
    for octet in range(4):
        moved |= look_up(places, (words >> (7 * octet)) & 127) << octet
    return moved


def _iq2_xxs(data: Tensor) -> tuple[Tensor, ...]:
    groups = data[:, 2:].unflatten(1, (8, 2, 4))
    signs = as_type(groups[:, :, 1].flatten(1), torch.int32)
    return groups[:, :, 0].flatten(1), _spread_signs(signs), data[:, :2]


def _iq2_xs(data: Tensor) -> tuple[Tensor, ...]:
    return data[:, 2:66], data[:, 66:], data[:, :2]


def _iq3_xxs(data: Tensor) -> tuple[Tensor, ...]:
    return data[:, 2:66], _spread_signs(as_type(data[:, 66:], torch.int32)), data[:, :2]


def _iq4_xs(data: Tensor) -> tuple[Tensor, ...]:
    """Codes; lower scale bits; d and upper scale bits."""
    codes = bit_planes(data[:, 8:], (0, 4), 15, 16).flatten(1)
    return _pack_nibbles(codes), data[:, 4:8], data[:, :4]


_I64, _I32, _I16, _I8 = torch.int64, torch.int32, torch.int16, torch.int8
_F16, _U8 = torch.float16, torch.uint8


def _layout(split: Callable[[Tensor], tuple[Tensor, ...]], *planes: Plane) -> Layout:
    return Layout(planes, split)


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "Q8_0": _layout(_q8_0, Plane(_I32, 4), Plane(_F16, 32)),
        "Q4_0": _layout(_q4_0, Plane(_I32, 8), Plane(_F16, 32)),
        "MXFP4": _layout(_mxfp4, Plane(_I32, 8), Plane(_U8, 32)),
        "NVFP4": _layout(_nvfp4, Plane(_I32, 8), Plane(_U8, 16)),
        "Q2_K": _layout(_q2_k, Plane(_I32, 16), Plane(_I32, 64), Plane(_I32, 256)),
        "Q3_K": _layout(
            _q3_k, Plane(_I32, 16), Plane(_I16, 16), Plane(_I32, 256, 3), Plane(_F16, 256)
        ),
        "Q4_K": _layout(_q4_k, Plane(_I32, 8), Plane(_I32, 256, 4)),
        "Q5_K": _layout(_q5_k, Plane(_I32, 8), Plane(_U8, 8), Plane(_I32, 256, 4)),
        "Q6_K": _layout(_q6_k, Plane(_I32, 8), Plane(_I16, 8), Plane(_I8, 16), Plane(_F16, 256)),
        "IQ2_XXS": _layout(_iq2_xxs, Plane(_I32, 32), Plane(_I32, 32), Plane(_F16, 256)),
        "IQ2_XS": _layout(_iq2_xs, Plane(_I16, 8), Plane(_U8, 32), Plane(_F16, 256)),
        "IQ3_XXS": _layout(_iq3_xxs, Plane(_I64, 32), Plane(_I32, 32), Plane(_F16, 256)),
        "IQ4_XS": _layout(_iq4_xs, Plane(_I32, 8), Plane(_I32, 256), Plane(_I32, 256)),
    }
)
"""Layouts of the types with blocks; floats and FP8 are simply rows."""
