"""Random attention problems, and what they must give by the reference in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton_device import DEVICE

from edgedsv4.kernels.kv_quant import dequantize_kv_rows, quantize_kv_rows
from edgedsv4.kernels.rope import RopeTable, apply_rope_reference, rope_frequencies, rope_table
from edgedsv4.kernels.sparse_attention import sparse_attention_reference

Parts = tuple[Tensor, ...]


def _family() -> str:
    """Target family of the device under test; "" for the interpreter."""
    if DEVICE == "cpu":
        return ""
    properties = torch.cuda.get_device_properties(DEVICE)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


FAMILY = _family() if torch.cuda.is_available() else ""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Geometry of an attention layer."""

    heads: int = 4
    dim: int = 64
    rope: int = 16
    window: int = 8
    ratio: int = 4


FLASH = Layer(heads=64, dim=512, rope=64, window=128)


def stored_rows(values: Tensor, rope: int, form: str) -> Parts:
    """Rows [N, d] as the cache holds them."""
    if form == "f32":
        return (values.float().contiguous(),)
    if form == "bf16":
        return (values.to(torch.bfloat16).contiguous(),)
    return quantize_kv_rows(values, rope)


def read_rows(parts: Parts, rope: int) -> Tensor:
    """Stored rows as float64 [N, d]."""
    if len(parts) == 1:
        return parts[0].double()
    return dequantize_kv_rows(*parts, rope, torch.float32).double()


def random_rows(count: int, layer: Layer, seed: int) -> Tensor:
    """Values [N, d] whose groups differ in scale."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, layer.dim, generator=generator)
    return values * torch.exp(torch.randn(count, 1, generator=generator))


def rope_tables(positions: Tensor, layer: Layer) -> RopeTable:
    """Float32 cos and sin [T, r / 2]."""
    return rope_table(positions, rope_frequencies(layer.rope, 1e4, None), torch.float32)


def expected(
    q: Tensor,
    positions: Tensor,
    sequence: Parts,
    compressed: Parts | None,
    selected: Tensor | None,
    sink: Tensor,
    layer: Layer,
) -> Tensor:
    """Attention of q [T, H, d] in float64; `sequence` holds the rows of positions 0, 1, ..."""
    rows = read_rows(sequence, layer.rope)
    ids = positions[:, None] - torch.arange(layer.window).flip(0)
    ids = ids.masked_fill(ids < 0, -1)
    if compressed is not None:
        entries = selected
        if entries is None:
            entries = torch.arange(compressed[0].shape[0]).expand(len(positions), -1)
            entries = entries.masked_fill(entries >= (positions[:, None] + 1) // layer.ratio, -1)
        entries = entries.long()
        ids = torch.cat((ids, torch.where(entries < 0, -1, entries + len(rows))), dim=1)
        rows = torch.cat((rows, read_rows(compressed, layer.rope)))
    outputs = sparse_attention_reference(q.double(), rows, ids, sink.double())
    table = rope_table(positions, rope_frequencies(layer.rope, 1e4, None), torch.float64)
    return apply_rope_reference(outputs, table, inverse=True).flatten(1)


def to_device(parts: Parts) -> Parts:
    """The same tensors where the kernels run."""
    return tuple(part.to(DEVICE) for part in parts)


def error(got: Tensor, want: Tensor) -> float:
    """Relative error in the 2-norm."""
    return ((got.cpu().double() - want).norm() / want.norm()).item()
