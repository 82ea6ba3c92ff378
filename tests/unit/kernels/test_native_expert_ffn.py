"""The experts of a chunk in C against the same sum in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numeric import assert_same_bits, relative_error

from edgedsv4.errors import BackendUnavailableError, ShapeError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.expert_ffn import expert_ffn, expert_ffn_reference
from edgedsv4.kernels.native.library import fill_matrix, library, new_run, pointer
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize, matrix_from_numpy

lib, ffi = library()
HIDDEN, WIDTH, SHARED = 96, 64, 160
GUARD = 64


def stored(rows: int, columns: int, kind: str, seed: int) -> QuantMatrix:
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    data = values / math.sqrt(columns) * 1.8
    if kind != "F32":
        data = gguf.quants.quantize(data, gguf.GGMLQuantizationType[kind])
    return matrix_from_numpy(
        np.ascontiguousarray(data).view(np.uint8), BLOCK_TYPES[kind], rows, columns
    )


@dataclass
class Layer:
    """Experts of one layer, and their records."""

    count: int
    k: int
    kinds: tuple[str, ...]
    """Types of w1, w3, w2, one after another over the experts."""
    has_shared: bool = True
    has_int8: bool = False
    limit: float = 1.5
    hidden: int = HIDDEN
    width: int = WIDTH
    shared_width: int = SHARED
    experts: list[list[QuantMatrix]] = field(init=False)
    shared: list[QuantMatrix] = field(init=False)
    record: Any = field(init=False)
    _kept: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        kinds = iter(self.kinds * (self.count + 1) * 3)
        self.experts = [self._expert(self.width, kinds, 10 * e) for e in range(self.count)]
        self.shared = self._expert(self.shared_width, kinds, 1000)
        self.record = ffi.new("dk_experts *")
        matrices, shared = ffi.new("dk_matrix[]", 3 * self.count), ffi.new("dk_matrix[3]")
        for place, matrix in enumerate(m for expert in self.experts for m in expert):
            fill_matrix(matrices[place], matrix)
        for place, matrix in enumerate(self.shared):
            fill_matrix(shared[place], matrix)
        self._kept = [matrices, shared]
        record = self.record
        record.matrices = matrices
        record.shared = shared if self.has_shared else ffi.NULL
        record.experts, record.k = self.count, self.k
        record.width, record.hidden = self.width, self.hidden
        record.shared_width = self.shared_width if self.has_shared else 0
        record.limit, record.shared_limit = self.limit, math.inf
        record.has_int8 = self.has_int8

    def _expert(self, width: int, kinds: Any, seed: int) -> list[QuantMatrix]:
        shapes = ((width, self.hidden), (width, self.hidden), (self.hidden, width))
        return [stored(*shape, next(kinds), seed + i) for i, shape in enumerate(shapes)]

    def expected(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """In float64 on the decoded weights."""
        wide = x.double()
        rows = []
        for token in range(len(x)):
            row = wide[token : token + 1]
            total = torch.zeros(1, self.hidden, dtype=torch.float64)
            for slot in range(self.k):
                expert = self.experts[int(ids[token, slot])]
                total += weights[token, slot].double() * _one(row, expert, self.limit)
            if self.has_shared:
                total += _one(row, self.shared, math.inf)
            rows.append(total)
        return torch.cat(rows)

    def run(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        is_small: bool,
        parts: tuple[set[int], ...] = (),
    ) -> torch.Tensor:
        """With `parts`, which experts come together, the first one with the shared expert."""
        tokens = len(x)
        out = torch.full((tokens * self.hidden + GUARD,), torch.nan)
        nbytes = lib.dk_experts_scratch_bytes(self.record, tokens)
        memory = torch.full((nbytes + 2 * GUARD,), 0xFF, dtype=torch.uint8)
        start = -memory.data_ptr() % 64
        run = new_run(2)
        run.cdata.is_small = is_small
        given = ffi.new("dk_input *")
        given.x, given.stride = pointer(x), self.hidden
        quantized = torch.empty(lib.dk_quantized_bytes(tokens, self.hidden) + 64, dtype=torch.uint8)
        if self.has_int8:
            at = quantized.data_ptr() + -quantized.data_ptr() % 64
            memory_at = ffi.cast("void *", at)
            run.check(lib.dk_quantize_rows(run.cdata, given, memory_at, tokens, self.hidden))
        narrow = ids.to(torch.int32)
        scratch = ffi.cast("void *", memory.data_ptr() + start)
        chosen = (pointer(narrow), pointer(weights))
        sizes = (self.record, tokens, scratch)
        if parts:
            row = ffi.new("int64_t *")
            for place, part in enumerate(parts):
                mask = bytes(expert in part for expert in range(self.count))
                run.check(
                    lib.dk_expert_part(
                        run.cdata, row, given, chosen[0], mask, *sizes[:2], place == 0, scratch
                    )
                )
            assert row[0] == tokens * self.k
            run.check(lib.dk_expert_sum(run.cdata, pointer(out), chosen[1], *sizes))
        else:
            run.check(lib.dk_expert_ffn(run.cdata, pointer(out), given, *chosen, *sizes))
        assert bool((memory[start + nbytes :] == 0xFF).all()), "scratch was overrun"
        assert bool(out[tokens * self.hidden :].isnan().all()), "the output was overrun"
        return out[: tokens * self.hidden].view(tokens, self.hidden)


def _one(x: torch.Tensor, expert: list[QuantMatrix], limit: float) -> torch.Tensor:
    w1, w3, w2 = (dequantize(matrix, torch.float64) for matrix in expert)
    gate = (x @ w1.T).clamp(max=limit)
    up = (x @ w3.T).clamp(-limit, limit)
    return (gate * torch.sigmoid(gate) * up) @ w2.T


def drawn(tokens: int, layer: Layer, seed: int = 1) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, layer.hidden, generator=draw)
    order = torch.rand(tokens, layer.count, generator=draw).argsort(dim=1)
    weights = torch.rand(tokens, layer.k, generator=draw)
    return x, order[:, : layer.k].contiguous(), weights


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("tokens", [1, 2, 17, 45])
@pytest.mark.parametrize(
    "kinds", [("F32",), ("Q8_0",), ("MXFP4", "F32", "Q8_0", "F32")], ids=["f32", "q8_0", "mixed"]
)
@pytest.mark.parametrize("has_shared", [True, False], ids=["shared", "routed only"])
@pytest.mark.parametrize("k", [1, 3])
def test_float32_activations_equal_the_sum_in_float64(
    tokens: int, kinds: tuple[str, ...], has_shared: bool, k: int
) -> None:
    layer = Layer(5, k, kinds, has_shared=has_shared)
    x, ids, weights = drawn(tokens, layer)
    got = layer.run(x, ids, weights, is_small=tokens <= 16)
    assert relative_error(got, layer.expected(x, ids, weights)) < 1e-6


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("tokens", [1, 2, 45])
@pytest.mark.parametrize(
    "kinds", [("Q8_0",), ("MXFP4", "F32", "Q8_0", "F32")], ids=["q8_0", "mixed"]
)
def test_int8_activations_cost_their_rounding_and_no_more(
    tokens: int, kinds: tuple[str, ...]
) -> None:
    """Two roundings to 127 steps of a group's maximum, about 0.7 % each."""
    layer = Layer(5, 2, kinds, has_int8=True)
    x, ids, weights = drawn(tokens, layer)
    got = layer.run(x, ids, weights, is_small=tokens <= 16)
    assert relative_error(got, layer.expected(x, ids, weights)) < 0.015


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("has_int8", [False, True])
def test_a_token_has_the_same_bits_in_every_small_chunk(has_int8: bool) -> None:
    layer = Layer(5, 3, ("MXFP4", "Q8_0", "F32"), has_int8=has_int8)
    x, ids, weights = drawn(16, layer)
    whole = layer.run(x, ids, weights, is_small=True)
    for part in (slice(0, 1), slice(3, 5), slice(4, 16)):
        alone = layer.run(x[part], ids[part].contiguous(), weights[part], is_small=True)
        assert_same_bits(f"tokens {part}", alone, whole[part])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("has_int8", [False, True])
@pytest.mark.parametrize("kind", ["Q8_0", "F32"])
def test_few_tokens_have_the_bits_of_many(kind: str, has_int8: bool) -> None:
    """Experts of few tokens are computed in other pieces, here several to an expert."""
    layer = Layer(4, 2, (kind,), has_int8=has_int8, hidden=512, width=544, shared_width=288)
    x, ids, weights = drawn(20, layer)
    whole = layer.run(x, ids, weights, is_small=True)
    for part in (slice(0, 1), slice(2, 18), slice(19, 20)):
        few = layer.run(x[part], ids[part].contiguous(), weights[part], is_small=True)
        assert_same_bits(f"tokens {part}", few, whole[part])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("tokens", [1, 2, 16, 45])
@pytest.mark.parametrize("has_int8", [False, True])
@pytest.mark.parametrize(
    "parts",
    [({0, 1, 2, 3, 4},), (set(), {4, 2, 0}, {1, 3}), ({3}, {1}, {0}, {4}, {2})],
    ids=["at once", "shared first", "one by one"],
)
def test_experts_in_parts_have_the_same_bits(
    tokens: int, has_int8: bool, parts: tuple[set[int], ...]
) -> None:
    layer = Layer(5, 3, ("MXFP4", "Q8_0", "F32"), has_int8=has_int8)
    x, ids, weights = drawn(tokens, layer)
    is_small = tokens <= 16
    whole = layer.run(x, ids, weights, is_small=is_small)
    got = layer.run(x, ids, weights, is_small=is_small, parts=parts)
    assert_same_bits(f"parts {parts}", got, whole)


@pytest.mark.usefixtures("isa")
def test_one_expert_may_be_in_several_slots_of_a_token() -> None:
    layer = Layer(5, 3, ("F32",))
    x, ids, weights = drawn(9, layer)
    ids[:, 1] = ids[:, 0]
    got = layer.run(x, ids, weights, is_small=True)
    assert relative_error(got, layer.expected(x, ids, weights)) < 1e-6


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("has_shared", [True, False])
def test_a_slot_without_an_expert_adds_nothing(tokens: int, has_shared: bool) -> None:
    layer = Layer(5, 3, ("MXFP4", "F32"), has_shared=has_shared)
    x, ids, weights = drawn(tokens, layer)
    ids[0, 0] = ids[-1, 2] = -1
    ids[tokens // 2] = -1
    silent = weights.masked_fill(ids < 0, 0.0)
    got = layer.run(x, ids, weights, is_small=True)
    assert relative_error(got, layer.expected(x, ids.clamp(min=0), silent)) < 1e-6


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "MXFP4"])
@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
@pytest.mark.parametrize("limit", [1.0, math.inf])
def test_the_operation_agrees_with_its_reference(kind: str, tokens: int, limit: float) -> None:
    gate, up = (stored(WIDTH, HIDDEN, kind, seed) for seed in (1, 2))
    down = stored(HIDDEN, WIDTH, kind, 3)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(4))
    expected = expert_ffn_reference(x.double(), gate, up, down, limit)
    for given in (x, torch.cat((x, x), dim=1)[:, :HIDDEN]):
        got = expert_ffn(given, gate, up, down, limit, backend="native")
        assert got.shape == x.shape
        assert relative_error(got, expected) < 1e-6


def test_float64_takes_the_reference() -> None:
    gate, up, down = (stored(HIDDEN, HIDDEN, "F32", seed) for seed in range(3))
    x = torch.ones(1, HIDDEN, dtype=torch.float64)
    assert expert_ffn(x, gate, up, down, 1.0).dtype == torch.float64
    with pytest.raises(BackendUnavailableError, match="expert_ffn"):
        expert_ffn(x, gate, up, down, 1.0, backend="native")


def test_matrices_that_do_not_fit_are_refused() -> None:
    gate, up = (stored(WIDTH, HIDDEN, "F32", seed) for seed in range(2))
    down = stored(HIDDEN, WIDTH, "F32", 2)
    x = torch.ones(1, HIDDEN)
    with pytest.raises(ShapeError, match="expert_ffn"):
        expert_ffn(x, gate, down, up, 1.0)
    with pytest.raises(ShapeError, match="expert_ffn"):
        expert_ffn(x[:, 1:], gate, up, down, 1.0)
