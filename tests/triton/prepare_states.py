"""A timeline of random products for the kernels that make rows, and what they must make of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numeric
import torch
from torch import Tensor
from triton_device import DEVICE

from edgedsv4.kernels.compress import pool_windows
from edgedsv4.kernels.gpu.prepare import (
    AttentionState,
    CompressorState,
    InputProducts,
    RowPositions,
)
from edgedsv4.kernels.hadamard import hadamard_reference
from edgedsv4.kernels.kv_quant import (
    dequantize_index_keys,
    dequantize_kv_rows,
    quantize_index_keys,
    quantize_kv_rows,
)
from edgedsv4.kernels.rms_norm import rms_norm_reference
from edgedsv4.kernels.rope import RopeTable, apply_rope_reference, rope_frequencies, rope_table

EPS = 1e-6
Rows = tuple[Tensor, ...]


def poisoned(like: Tensor, count: int) -> Tensor:
    """`count` rows like those of a tensor, NaN or bytes of ones."""
    fill = torch.nan if like.is_floating_point() else 255
    return torch.full((count, *like.shape[1:]), fill, dtype=like.dtype)


@dataclass(slots=True, kw_only=True)
class Sizes:
    """Widths of one layer."""

    ratio: int
    exact: bool = False
    rank: int = 24
    dim: int = 64
    rope_dim: int = 16
    index_dim: int = 32
    window_slots: int = 40
    spare: int = 3
    """Slots of the raw rings that are not needed."""

    @property
    def series(self) -> int:
        return 2 if self.ratio == 4 else 1

    @property
    def raw_slots(self) -> int:
        return self.series * self.ratio + self.spare


@dataclass(slots=True, kw_only=True)
class _Pool:
    """One compressor's products and parameters."""

    values: Tensor
    gates: Tensor
    ape: Tensor
    norm: Tensor
    is_index: bool


@dataclass(slots=True)
class Timeline:
    """Products of `length` tokens, on the CPU."""

    sizes: Sizes
    length: int
    seed: int = 0
    qr: Tensor = field(init=False)
    kv: Tensor = field(init=False)
    q_norm: Tensor = field(init=False)
    kv_norm: Tensor = field(init=False)
    pools: list[_Pool] = field(init=False)

    def __post_init__(self) -> None:
        sizes, generator = self.sizes, torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.qr, self.kv = draw(self.length, sizes.rank), draw(self.length, sizes.dim) * 3
        self.q_norm, self.kv_norm = 1 + draw(sizes.rank) / 4, 1 + draw(sizes.dim) / 4
        widths = {0: (), 4: (sizes.dim, sizes.index_dim), 128: (sizes.dim,)}[sizes.ratio]
        self.pools = [
            _Pool(
                values=draw(self.length, sizes.series * width),
                gates=2 * draw(self.length, sizes.series * width),
                ape=draw(sizes.ratio, sizes.series * width),
                norm=1 + draw(width) / 4,
                is_index=index == 1,
            )
            for index, width in enumerate(widths)
        ]

    # ---- what the kernels are given ----

    def table(self, positions: Tensor) -> RopeTable:
        return rope_table(
            positions, rope_frequencies(self.sizes.rope_dim, 100.0, None), torch.float32
        )

    def positions(self, start: int, tokens: int) -> RowPositions:
        ratio = max(self.sizes.ratio, 1)
        windows = torch.arange(start // ratio, start // ratio + tokens // ratio + 1) * ratio
        own, starts = self.table(torch.arange(start, start + tokens)), self.table(windows)
        return RowPositions(
            position=torch.tensor([start], dtype=torch.int32, device=DEVICE),
            cos=own.cos.to(DEVICE),
            sin=own.sin.to(DEVICE),
            window_cos=starts.cos.to(DEVICE),
            window_sin=starts.sin.to(DEVICE),
            bad=torch.zeros(1, dtype=torch.int32, device=DEVICE),
        )

    def products(self, start: int, tokens: int) -> InputProducts:
        """Views of one buffer, so rows have a stride of their own."""
        part = slice(start, start + tokens)
        pairs = [tensor[part] for pool in self.pools for tensor in (pool.values, pool.gates)]
        parts = [self.qr[part], self.kv[part], *pairs]
        buffer = torch.cat(parts, dim=1).to(DEVICE)
        qr, kv, *views = buffer.split([tensor.shape[1] for tensor in parts], dim=1)
        return InputProducts(
            qr=qr,
            kv=kv,
            compressor=(views[0], views[1]) if views else None,
            indexer=(views[2], views[3]) if len(views) > 2 else None,
        )

    def state(self, start: int) -> AttentionState:
        """The state before position `start`; what no token of the future may read is poisoned."""
        sizes = self.sizes
        compressors: list[CompressorState | None] = [None, None]
        for index, pool in enumerate(self.pools):
            rows = self.finished(pool, 0, self.length // sizes.ratio)
            done = start // sizes.ratio
            compressors[index] = CompressorState(
                ape=pool.ape.to(DEVICE),
                norm=pool.norm.to(DEVICE),
                ring=_ring((self.raw(pool),), start, sizes.raw_slots)[0],
                rows=tuple(
                    torch.cat((part[:done], poisoned(part, part.shape[0] - done + 1))).to(DEVICE)
                    for part in rows
                ),
                has_hadamard=pool.is_index and not sizes.exact,
            )
        return AttentionState(
            q_norm=self.q_norm.to(DEVICE),
            kv_norm=self.kv_norm.to(DEVICE),
            window=_ring(self.window_rows(), start, sizes.window_slots),
            compressor=compressors[0],
            indexer=compressors[1],
            ratio=sizes.ratio,
            rope_dim=sizes.rope_dim,
            eps=EPS,
        )

    # ---- what they must make ----

    def normed_qr(self) -> Tensor:
        return rms_norm_reference(self.qr, self.q_norm, EPS)

    def window_rows(self) -> Rows:
        rows = rms_norm_reference(self.kv, self.kv_norm, EPS)
        rows = apply_rope_reference(rows, self.table(torch.arange(self.length)))
        return self._stored(rows, is_index=False)

    def raw(self, pool: _Pool) -> Tensor:
        bias = pool.ape[torch.arange(self.length) % self.sizes.ratio]
        return torch.cat((pool.values, pool.gates + bias), dim=1)

    def finished(self, pool: _Pool, first: int, stop: int) -> Rows:
        """Stored rows of windows first..stop-1."""
        ratio = self.sizes.ratio
        windows = self.raw(pool)[: stop * ratio].view(stop, ratio, -1)
        values, gates = windows.chunk(2, dim=-1)
        rows = pool_windows(values, gates, has_overlap=self.sizes.series == 2, previous=False)
        rows = rms_norm_reference(rows, pool.norm, EPS)
        rows = apply_rope_reference(rows, self.table(torch.arange(stop) * ratio))
        if pool.is_index and not self.sizes.exact:
            rows = hadamard_reference(rows)
        return self._stored(rows[first:], is_index=pool.is_index)

    def _stored(self, rows: Tensor, *, is_index: bool) -> Rows:
        if self.sizes.exact:
            return (rows,)
        if is_index:
            return quantize_index_keys(rows, backend="reference")
        return quantize_kv_rows(rows, self.sizes.rope_dim, backend="reference")


def _ring(rows: Rows, start: int, slots: int) -> Rows:
    ring = tuple(poisoned(part, slots) for part in rows)
    kept = torch.arange(max(0, start - slots), start)
    for stored, part in zip(ring, rows, strict=True):
        stored[kept % slots] = part[kept]
    return tuple(part.to(DEVICE) for part in ring)


def assert_same_rows(got: Rows, expected: Rows, rope_dim: int, *, is_index: bool) -> None:
    """Equal up to the last bits of a norm: those move a value by a code step now and then.

    Poison must be poison in both.
    """
    got, expected = (tuple(part.cpu() for part in rows) for rows in (got, expected))
    if len(expected) == 1:
        assert torch.equal(got[0].isnan(), expected[0].isnan())
        numeric.assert_close("rows", got[0].nan_to_num(), expected[0].nan_to_num())
        return
    for name, found, wanted in zip(("codes", "scales"), got, expected, strict=True):
        equal = (found == wanted).double().mean().item()
        assert equal >= 0.99, f"{name}: {equal:.4f} of the bytes are equal"
    if is_index:
        decoded = [dequantize_index_keys(*rows, torch.float32) for rows in (got, expected)]
    else:
        decoded = [dequantize_kv_rows(*rows, rope_dim, torch.float32) for rows in (got, expected)]
    assert torch.equal(*(rows.isnan() for rows in decoded))
    assert numeric.relative_error(*(rows.nan_to_num() for rows in decoded)) < 0.02
