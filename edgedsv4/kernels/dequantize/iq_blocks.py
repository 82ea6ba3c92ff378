"""Decoders of the IQ types: indices into grids of 4 or 8 values, signs, and small scales.

Each function: uint8 [n, block_bytes] -> f32 [n, 256]. The order of the float operations is ggml's,
so the results are equal bit for bit. Notation: d half-precision scale, s small integer scale.

Source: block structs, grids and dequantize functions of ggml (ggml-common.h, ggml-quants.c).
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgedsv4.kernels.dequantize.fields import as_type, halves, look_up_rows, spread
from edgedsv4.kernels.dequantize.tables import even_sign_rows, iq_grid, sign_rows

_DELTA = 0.125  # shift of a group's grid values in the IQ1 types


def _scaled(values: Tensor, signs: Tensor, scale: Tensor) -> Tensor:
    """Product of values and signs of the same size and a scale [n, groups]: [n, 256]."""
    n, groups = scale.shape
    signed = values.view(n, groups, -1).mul_(signs.view(n, groups, -1))
    return signed.mul_(scale.unsqueeze(2)).view(n, 256)


def _signs_and_scales(words: Tensor) -> tuple[Tensor, Tensor]:
    """Four 7-bit sign patterns and a 4-bit scale per word: int32 [n, 8] -> [n, 32, 8], [n, 8]."""
    patterns = spread(words, (0, 7, 14, 21), 127)
    return look_up_rows(even_sign_rows(words.device), patterns), ((words >> 28) & 15).float()


def _nibble_scales(field: Tensor) -> Tensor:
    """4-bit scales, low nibble first: uint8 [n, w] -> f32 [n, 2w]."""
    return spread(field, (0, 4), 15).float()


def iq2_xxs(data: Tensor) -> Tensor:
    """Fields f16 d, 8 x {u8 index[4], u7 sign[4] and u4 s}; x = d (s + 1/2) / 4 grid sign."""
    halves_of_group = data[:, 2:].unflatten(1, (8, 8))
    index = halves_of_group[:, :, :4].flatten(1)
    signs, s = _signs_and_scales(as_type(halves_of_group[:, :, 4:].flatten(1), torch.int32))
    values = look_up_rows(iq_grid("IQ2_XXS", data.device), index)
    return _scaled(values, signs, s.add_(0.5).mul_(halves(data[:, :2])).mul_(0.25))


def iq2_xs(data: Tensor) -> Tensor:
    """Fields f16 d, u16 {9-bit index, 7-bit sign}[32], u4 s[16]; x = d (s + 1/2) / 4 grid sign."""
    words = as_type(data[:, 2:66], torch.int16).int() & 0xFFFF
    values = look_up_rows(iq_grid("IQ2_XS", data.device), words & 511)
    signs = look_up_rows(even_sign_rows(data.device), words >> 9)
    s = _nibble_scales(data[:, 66:])
    return _scaled(values, signs, s.add_(0.5).mul_(halves(data[:, :2])).mul_(0.25))


def iq2_s(data: Tensor) -> Tensor:
    """Fields f16 d, u8 index[32], u8 sign[32], upper index bits u2 [32], u4 s[16]; x as IQ2_XS."""
    index = data[:, 2:34].int() | (spread(data[:, 66:74].int(), (0, 2, 4, 6), 3) << 8)
    values = look_up_rows(iq_grid("IQ2_S", data.device), index)
    signs = look_up_rows(sign_rows(data.device), data[:, 34:66])
    s = _nibble_scales(data[:, 74:])
    return _scaled(values, signs, s.add_(0.5).mul_(halves(data[:, :2])).mul_(0.25))


def iq3_xxs(data: Tensor) -> Tensor:
    """Fields f16 d, u8 index[64], 8 x {u7 sign[4] and u4 s}; x = d (s + 1/2) / 2 grid sign."""
    values = look_up_rows(iq_grid("IQ3_XXS", data.device), data[:, 2:66])
    signs, s = _signs_and_scales(as_type(data[:, 66:], torch.int32))
    return _scaled(values, signs, s.add_(0.5).mul_(halves(data[:, :2])).mul_(0.5))


def iq3_s(data: Tensor) -> Tensor:
    """Fields f16 d, u8 index[64], ninth bits, u8 sign[32], u4 s[8]; x = d (2s + 1) grid sign."""
    index = data[:, 2:66].int() | (spread(data[:, 66:74].int(), range(8), 1) << 8)
    values = look_up_rows(iq_grid("IQ3_S", data.device), index)
    signs = look_up_rows(sign_rows(data.device), data[:, 74:106])
    s = _nibble_scales(data[:, 106:])
    return _scaled(values, signs, s.mul_(2).add_(1).mul_(halves(data[:, :2])))


def iq1_s(data: Tensor) -> Tensor:
    """Fields f16 d, u8 index[32], u16 {upper index bits u3 [4], u3 s, sign of delta}[8].

    x = d (2s + 1) (grid + delta).
    """
    words = as_type(data[:, 34:], torch.int16).int() & 0xFFFF
    index = data[:, 2:34].int() | (spread(words, (0, 3, 6, 9), 7) << 8)
    delta = _DELTA - 2 * _DELTA * (words >> 15).float()
    scale = ((words >> 12) & 7).float().mul_(2).add_(1).mul_(halves(data[:, :2]))
    return _shifted(index, delta, scale)


def iq1_m(data: Tensor) -> Tensor:
    """Fields u8 index[32], u4 {upper index bits, sign of delta}[32], u16 {u3 s[4], u4 d}[4].

    x = d (2s + 1) (grid + delta).
    """
    nibble = spread(data[:, 32:48].int(), (0, 4), 15)
    index = data[:, :32].int() | ((nibble & 7) << 8)
    delta = _DELTA - 2 * _DELTA * (nibble >> 3).float()
    words = as_type(data[:, 48:], torch.int16).int() & 0xFFFF
    scale = spread(words, (0, 3, 6, 9), 7).float().mul_(2).add_(1).mul_(iq1_m_scale(data))
    return _shifted(index, delta, scale)


def iq1_m_scale(data: Tensor) -> Tensor:
    """The d of IQ1_M, [n, 1]: a half float whose nibbles are the top bits of the four words."""
    words = as_type(data[:, 48:], torch.int16).int() & 0xFFFF
    nibbles = (words >> 12) << torch.tensor((0, 4, 8, 12), dtype=torch.int32, device=data.device)
    return nibbles.sum(1, keepdim=True).to(torch.int16).view(torch.float16).float()


def _shifted(index: Tensor, delta: Tensor, scale: Tensor) -> Tensor:
    """(grid + delta) scale: index [n, 32], delta and scale [n, groups] -> [n, 256]."""
    n = len(index)
    values = look_up_rows(iq_grid("IQ1_S", index.device), index)
    shifted = values.view(n, delta.shape[1], -1).add_(delta.unsqueeze(2))
    return shifted.view(n, scale.shape[1], -1).mul_(scale.unsqueeze(2)).view(n, 256)
