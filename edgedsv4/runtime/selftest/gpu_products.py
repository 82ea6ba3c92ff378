"""Checks of the kernels that read weights on a GPU: decoding, products, routed experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.gpu.byte_products import BYTE_ORDERS
from edgedsv4.kernels.gpu.byte_vector import GROUP, empty_bytes, to_bytes
from edgedsv4.kernels.gpu.expert_bytes import down_bytes, gate_up_bytes
from edgedsv4.kernels.gpu.expert_matmul import expert_ffn_chunk, expert_scratch
from edgedsv4.kernels.gpu.expert_scaled import (
    expert_ffn_scaled,
    has_scaled_products,
    scaled_reference,
)
from edgedsv4.kernels.gpu.expert_vec import expert_down, expert_gate_up
from edgedsv4.kernels.gpu.gather_rows import dequantize as decode_rows
from edgedsv4.kernels.gpu.gather_rows import embed_streams
from edgedsv4.kernels.gpu.matmul import matmul, matmul_scratch_bytes
from edgedsv4.kernels.gpu.matvec import matvec
from edgedsv4.kernels.gpu.nvidia import has_byte_products
from edgedsv4.kernels.gpu.planes import (
    SUPPORTED,
    DeviceMatrix,
    device_matrix,
    empty_bank,
    fill_bank,
)
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize
from edgedsv4.kernels.swiglu import swiglu_reference
from edgedsv4.runtime.selftest.check import LIMIT, Check, Outputs, draw
from edgedsv4.runtime.selftest.matrices import COLUMNS, ROWS, random_matrix

BF16_LIMIT = 3.3e-3
"""Error of sums of bfloat16 numbers in float32, of values that are rounded once more."""
_HIDDEN, _WIDTH, _SLOTS, _CHOSEN = 256, 256, 3, 2
_ROUTED, _SHARED = (1.5, 9.0)


def product_checks(device: torch.device, family: str) -> Iterator[Check]:
    """One check per type of weights, then what is made of several matrices."""
    for seed, name in enumerate(sorted(SUPPORTED)):
        weight = random_matrix(BLOCK_TYPES[name], ROWS, COLUMNS, seed)
        yield _check(
            f"weights: {name}", partial(_products, weight, device), partial(_right, weight)
        )
    yield _check("embedding", partial(_embed, device), _embedded, limit=0)
    yield _check("products in bfloat16", partial(_rounded, device), _rounded_right, BF16_LIMIT)
    yield _check("experts of a token", partial(_token, device), _token_right)
    if has_byte_products(family):
        compute = partial(_token_bytes, device)
        yield _check("experts of a token, as bytes", compute, _token_bytes_right, BF16_LIMIT)
    for is_precise, limit in ((True, LIMIT), (False, BF16_LIMIT)):
        label = "float32" if is_precise else "float16"
        chunk = partial(_chunk, device, is_precise)
        yield _check(
            f"experts of a chunk, {label}", chunk, partial(_chunk_right, is_precise), limit
        )


def scaled_checks(device: torch.device, family: str) -> Iterator[Check]:
    """Experts by block-scaled products, on cards that have them."""
    if has_scaled_products(family):
        compute = partial(_scaled, device)
        yield _check("experts of a chunk, 8-bit floats", compute, _scaled_right, BF16_LIMIT)


def _check(
    name: str, compute: Callable[[], Outputs], expected: Callable[[], Outputs], limit: float = LIMIT
) -> Check:
    return Check(name, lambda _backend: compute(), expected, limit, ("triton",))


def unset(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for results: what a kernel leaves out is NaN."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def _wide(weight: QuantMatrix) -> Tensor:
    return dequantize(weight, torch.float32).double()


# ---- one matrix: decoded, times one token, times some, times a chunk ----


def _inputs() -> list[Tensor]:
    return [draw(200 + tokens, tokens, COLUMNS) for tokens in (1, 3, 19)]


def _products(weight: QuantMatrix, device: torch.device) -> list[Tensor]:
    matrix = device_matrix(weight, device)
    decoded = unset(device, ROWS, COLUMNS)
    decode_rows(decoded, matrix, 0, ROWS)
    one, few, many = (x.to(device) for x in _inputs())
    results = [unset(device, len(x), ROWS) for x in (one, few, many)]
    matvec(results[0], one, [matrix])
    matvec(results[1], few, [matrix])
    _multiply(results[2], many, matrix, is_precise=True)
    return [decoded, *results]


def _right(weight: QuantMatrix) -> list[Tensor]:
    wide = _wide(weight)
    return [wide, *(x.double() @ wide.T for x in _inputs())]


def _multiply(y: Tensor, x: Tensor, matrix: DeviceMatrix, *, is_precise: bool) -> None:
    size = matmul_scratch_bytes(len(x), matrix, x.device, precise=is_precise)
    scratch = torch.empty(size, dtype=torch.uint8, device=x.device)
    matmul(y, x, matrix, precise=is_precise, scratch=scratch)


def _rounded_inputs() -> tuple[QuantMatrix, list[Tensor]]:
    """Chunks on both sides of the length from which a library multiplies."""
    weight = random_matrix(BLOCK_TYPES["Q8_0"], ROWS, COLUMNS, 7)
    return weight, [draw(210 + tokens, tokens, COLUMNS) for tokens in (5, 70)]


def _rounded(device: torch.device) -> list[Tensor]:
    weight, inputs = _rounded_inputs()
    matrix, results = device_matrix(weight, device), []
    for x in inputs:
        results.append(unset(device, len(x), ROWS))
        _multiply(results[-1], x.to(device), matrix, is_precise=False)
    return results


def _rounded_right() -> list[Tensor]:
    weight, inputs = _rounded_inputs()
    wide = _bf16(_wide(weight))
    return [_bf16(x) @ wide.T for x in inputs]


def _bf16(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).double()


def _f16(values: Tensor) -> Tensor:
    return values.to(torch.float16).double()


# ---- embedding ----


def _embed(device: torch.device) -> list[Tensor]:
    weight, ids = _embedding()
    streams = unset(device, len(ids), 4, COLUMNS)
    embed_streams(streams, ids.to(device), device_matrix(weight, device))
    return [streams]


def _embedded() -> list[Tensor]:
    weight, ids = _embedding()
    return [_wide(weight)[ids][:, None].expand(-1, 4, -1)]


def _embedding() -> tuple[QuantMatrix, Tensor]:
    return random_matrix(BLOCK_TYPES["Q8_0"], ROWS, COLUMNS, 8), torch.tensor([ROWS - 1, 0, 5])


# ---- routed experts and a shared one ----


class _Experts:
    """Experts of the sizes above, as files hold them."""

    def __init__(self, gate_up: str = "IQ2_XXS", down: str = "Q2_K") -> None:
        shapes = ((gate_up, _WIDTH, _HIDDEN), (gate_up, _WIDTH, _HIDDEN))
        self.routed = [
            [
                random_matrix(BLOCK_TYPES[name], rows, columns, 40 + 10 * i + slot)
                for slot in range(_SLOTS)
            ]
            for i, (name, rows, columns) in enumerate((*shapes, (down, _HIDDEN, _WIDTH)))
        ]
        q8 = BLOCK_TYPES["Q8_0"]
        self.shared = [
            random_matrix(q8, *shape, 70 + i)
            for i, shape in enumerate(((64, _HIDDEN), (64, _HIDDEN), (_HIDDEN, 64)))
        ]

    def banks(self, device: torch.device) -> list[DeviceMatrix]:
        """The routed ones on a device."""
        found = []
        for matrices in self.routed:
            first = matrices[0]
            name = first.block_type.name
            bank = empty_bank(name, _SLOTS, first.rows, first.columns, device)
            for slot, weight in enumerate(matrices):
                fill_bank(bank, slot, weight)
            found.append(bank)
        return found


def _token_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """The sublayer's input, small enough that the clamps let most values through; its experts."""
    slots = torch.tensor([2, 0], dtype=torch.int32)
    return draw(220, 1, _HIDDEN) / 64, slots, torch.tensor([0.75, 0.5])


def _token(device: torch.device) -> list[Tensor]:
    experts = _Experts()
    x, slots, weights = (part.to(device) for part in _token_inputs())
    w1, w3, w2 = experts.banks(device)
    s1, s3, s2 = (device_matrix(weight, device) for weight in experts.shared)
    h, out = unset(device, _CHOSEN * _WIDTH + 64), unset(device, 1, _HIDDEN)
    expert_gate_up(h, x, slots, (w1, w3), (s1, s3), (_ROUTED, _SHARED))
    expert_down(out, h, slots, weights, w2, s2)
    return [h, out]


def _token_right() -> list[Tensor]:
    experts = _Experts()
    x, slots, weights = _token_inputs()
    w1, w3, w2 = ([_wide(matrices[slot]) for slot in slots.tolist()] for matrices in experts.routed)
    s1, s3, s2 = (_wide(weight) for weight in experts.shared)
    row = x[0].double()
    hidden = [swiglu_reference(a @ row, b @ row, _ROUTED) for a, b in zip(w1, w3, strict=True)]
    hidden.append(swiglu_reference(s1 @ row, s3 @ row, _SHARED))
    parts = zip(weights.double(), w2, hidden, strict=False)
    out = s2 @ hidden[-1] + sum(factor * (w @ h) for factor, w, h in parts)
    return [torch.cat(hidden), out[None]]


def _token_bytes(device: torch.device) -> list[Tensor]:
    x, slots, weights = (part.to(device) for part in _token_inputs())
    w1, w3, w2 = _Experts().banks(device)
    rounded = empty_bytes(_HIDDEN, BYTE_ORDERS[w1.type], device)
    h = empty_bytes(_CHOSEN * _WIDTH, BYTE_ORDERS[w2.type], device)
    out = unset(device, 1, _HIDDEN)
    to_bytes(rounded, x)
    gate_up_bytes(h, rounded, slots, (w1, w3), _ROUTED, width=_WIDTH)
    down_bytes(out, h, slots, weights, w2)
    return [out]


def _token_bytes_right() -> list[Tensor]:
    """A hidden value that lies between two bytes may be rounded either way."""
    experts = _Experts()
    x, slots, weights = _token_inputs()
    w1, w3, w2 = ([_wide(matrices[slot]) for slot in slots.tolist()] for matrices in experts.routed)
    row, out = _in_bytes(x[0]), torch.zeros(1, _HIDDEN, dtype=torch.float64)
    for factor, gate, up, down in zip(weights.double(), w1, w3, w2, strict=True):
        out += factor * (down @ _in_bytes(swiglu_reference(gate @ row, up @ row, _ROUTED)))
    return [out]


def _in_bytes(x: Tensor) -> Tensor:
    """Rounded to multiples of a 127th of the largest value of each group of 32, float64."""
    groups = x.double().view(-1, GROUP)
    scale = groups.abs().amax(1, keepdim=True) / 127.0
    return (torch.round(groups / scale) * scale).flatten()


def _chunk_inputs() -> tuple[Tensor, Tensor, Tensor]:
    tokens = 9
    generator = torch.Generator().manual_seed(9)
    ids = [torch.randperm(_SLOTS, generator=generator)[:_CHOSEN] for _ in range(tokens)]
    return (
        draw(221, tokens, _HIDDEN) / 64,
        torch.stack(ids).int(),
        draw(222, tokens, _CHOSEN).abs(),
    )


def _chunk(device: torch.device, is_precise: bool) -> list[Tensor]:
    x, ids, weights = (part.to(device) for part in _chunk_inputs())
    out = unset(device, *x.shape)
    scratch = expert_scratch(
        len(x), _CHOSEN, _SLOTS, _HIDDEN, _WIDTH, device=device, precise=is_precise
    )
    w1, w3, w2 = _Experts().banks(device)
    expert_ffn_chunk(
        out, x, ids, weights, (w1, w3, w2), _ROUTED, scratch=scratch, precise=is_precise
    )
    return [out]


def _chunk_right(is_precise: bool) -> list[Tensor]:
    """On operands that are rounded as the kernels round them, with weights of these types."""
    rounded = Tensor.double if is_precise else _f16
    return [_sum_of_experts(_Experts(), rounded, rounded)]


def _sum_of_experts(
    experts: _Experts,
    of_weights: Callable[[Tensor], Tensor],
    of_inputs: Callable[[Tensor], Tensor],
) -> Tensor:
    """In float64, on weights and inputs of products that are rounded so."""
    x, ids, weights = _chunk_inputs()
    matrices = [[of_weights(_wide(weight)) for weight in part] for part in experts.routed]
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, token in enumerate(of_inputs(x)):
        for slot, factor in zip(ids[row].tolist(), weights[row].double(), strict=True):
            w1, w3, w2 = (part[slot] for part in matrices)
            hidden = of_inputs(swiglu_reference(w1 @ token, w3 @ token, _ROUTED))
            out[row] += factor * (w2 @ hidden)
    return out


def _scaled(device: torch.device) -> list[Tensor]:
    x, ids, weights = (part.to(device) for part in _chunk_inputs())
    out = unset(device, *x.shape)
    sizes = (len(x), _CHOSEN, _SLOTS, _HIDDEN, _WIDTH)
    scratch = expert_scratch(*sizes, device=device, precise=False)
    w1, w3, w2 = _Experts("MXFP4", "MXFP4").banks(device)
    expert_ffn_scaled(out, x, ids, weights, (w1, w3, w2), _ROUTED, scratch=scratch)
    return [out]


def _scaled_right() -> list[Tensor]:
    return [_sum_of_experts(_Experts("MXFP4", "MXFP4"), Tensor.double, scaled_reference)]
