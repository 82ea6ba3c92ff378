"""C products with stored weights equal the float64 product, for every type and instruction set."""

from __future__ import annotations

import native_products
import numpy as np
import pytest
import torch
from native_products import (
    FLOAT_TYPES,
    INT8_TYPES,
    Product,
    activations,
    assert_product,
    block_columns,
    compute,
    make_input,
    matrix,
    round_rows,
)

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.native.library import library
from edgedsv4.kernels.quant_matmul import QuantMatrix

# Limits, in units of 2^-24 of the sum of magnitudes; twice what was measured over all types.
FLOAT_LIMIT = 2.0
INT8_LIMIT = 3.0

# Instruction sets that add the groups of IQ2_XXS in one order.
SAME_GRID_BITS = ("avx2", "avx-vnni", "avx512", "avx512-vbmi", "amx")

pytestmark = pytest.mark.usefixtures("isa")


def columns_of(name: str) -> list[int]:
    """One block, odd numbers of blocks, a slab and more."""
    block = block_columns(name)
    sizes = {block, 32, 96, 256, 544, 2048 + block}
    return sorted(size for size in sizes if size % block == 0)


def int8_product(name: str, rows: int, columns: int, tokens: int, shift: int = 0) -> None:
    weight = matrix(name, rows, columns, shift=shift)
    rounded = round_rows(activations(tokens, columns))
    (got,) = compute([Product(weight, rounded.cdata, tokens)])
    assert_product(got, rounded.values(), weight, INT8_LIMIT)


def float_product(name: str, rows: int, columns: int, tokens: int, shift: int = 0) -> None:
    weight = matrix(name, rows, columns, shift=shift)
    x = activations(tokens, columns)
    (got,) = compute([Product(weight, make_input(x), tokens)])
    assert_product(got, x, weight, FLOAT_LIMIT)


@pytest.mark.parametrize("name", INT8_TYPES)
def test_every_int8_type_has_its_form(name: str) -> None:
    lib, _ = library()
    assert lib.dk_type_has_int8(lib.dk_type_id(name.encode()))


@pytest.mark.parametrize("name", [*FLOAT_TYPES, "no such type"])
def test_other_types_have_no_int8_form(name: str) -> None:
    lib, _ = library()
    assert not lib.dk_type_has_int8(lib.dk_type_id(name.encode()))


@pytest.mark.parametrize("name", INT8_TYPES)
def test_int8_products_of_all_widths(name: str) -> None:
    for columns in columns_of(name):
        int8_product(name, 19, columns, 2)
        int8_product(name, 19, columns, 18)


@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 17, 33, 100, 300])
@pytest.mark.parametrize("rows", [1, 3, 17, 130])
@pytest.mark.parametrize("name", ["Q8_0", "NVFP4"])
def test_int8_products_of_all_heights(name: str, rows: int, tokens: int) -> None:
    int8_product(name, rows, 192, tokens)


@pytest.mark.parametrize("name", [*INT8_TYPES, *FLOAT_TYPES])
def test_float_products_of_all_widths(name: str) -> None:
    for columns in columns_of(name):
        float_product(name, 11, columns, 2)
        float_product(name, 11, columns, 7)


@pytest.mark.parametrize("columns", [1, 5, 15, 16, 17, 100, 511, 513])
@pytest.mark.parametrize("name", ["F32", "BF16", "FP8_E4M3"])
def test_float_products_of_odd_widths(name: str, columns: int) -> None:
    float_product(name, 9, columns, 4)


@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 17, 33, 100])
@pytest.mark.parametrize("rows", [1, 3, 17, 130])
@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0"])
def test_float_products_of_all_heights(name: str, rows: int, tokens: int) -> None:
    float_product(name, rows, 96, tokens)


@pytest.mark.parametrize("shift", [1, 2, 5, 32])
@pytest.mark.parametrize("name", [*INT8_TYPES, "F32", "F16", "BF16", "FP8_E4M3"])
def test_weights_may_lie_at_any_address(name: str, shift: int) -> None:
    float_product(name, 3, 512, 2, shift)
    if name in INT8_TYPES:
        int8_product(name, 3, 512, 2, shift)
        int8_product(name, 3, 512, 17, shift)


@pytest.mark.parametrize("name", [name for name in INT8_TYPES if name != "FP4_E2M1"])
def test_extreme_codes_do_not_overflow(name: str) -> None:
    """All bits of the codes set and all activations at the end of their range."""
    columns = 512
    data = torch.full((3, BLOCK_TYPES[name].row_bytes(columns)), 255, dtype=torch.uint8)
    blocks = data.view(3, -1, BLOCK_TYPES[name].block_bytes)
    if name == "MXFP4":
        blocks[:, :, 0] = 127
    elif name == "NVFP4":
        blocks[:, :, :4] = 0x7E
    for start in native_products.HALVES.get(name, ()):
        half = 0.0 if start in (2, 82) else 0.5
        blocks[:, :, start : start + 2] = torch.tensor([half]).half().view(torch.uint8)
    if name == "Q8_0":
        blocks[0, :, 2:] = 127
        blocks[1, :, 2:] = 128
        blocks[2, :, 2::2] = 127
    weight = QuantMatrix(BLOCK_TYPES[name], 3, columns, data)
    for tokens in (2, 20):
        x = np.ones((tokens, columns), dtype=np.float32)
        x[1::2] = -1
        rounded = round_rows(x)
        (got,) = compute([Product(weight, rounded.cdata, tokens)])
        assert_product(got, rounded.values(), weight, INT8_LIMIT)


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize(
    ("name", "columns"), [("Q8_0", 96), ("F16", 96), ("MXFP4", 512), ("Q4_K", 512), ("Q6_K", 512)]
)
def test_a_range_of_rows_is_multiplied_alone(name: str, columns: int, tokens: int) -> None:
    weight = matrix(name, 64, columns)
    rounded = round_rows(activations(tokens, columns))
    (whole,) = compute([Product(weight, rounded.cdata, tokens)])
    for first, rows in ((0, 5), (7, 40), (63, 1), (5, 0)):
        (part,) = compute([Product(weight, rounded.cdata, tokens, first, rows)])
        np.testing.assert_array_equal(part, whole[:, first : first + rows])


def test_rows_of_x_may_be_apart() -> None:
    wide = activations(4, 300)
    weight = matrix("F32", 9, 100)
    (got,) = compute([Product(weight, make_input(wide[:, 50:150]), 4)])
    assert_product(got, wide[:, 50:150], weight, FLOAT_LIMIT)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_list_of_mixed_products_is_computed_in_one_call(threads: int) -> None:
    names = ("F32", "Q8_0", "Q4_K", "BF16", "NVFP4", "MXFP4")
    products, inputs = [], []
    for index in range(270):
        name, tokens = names[index % len(names)], (1, 3, 20, 1)[index % 4]
        x = activations(tokens, 256, seed=index)
        rounded = round_rows(x)
        inputs.append(x if name in FLOAT_TYPES else rounded.values())
        weight = matrix(name, 1 + index % 37, 256, seed=index)
        products.append(Product(weight, rounded.cdata, tokens))
    for got, x, product in zip(compute(products, threads=threads), inputs, products, strict=True):
        assert_product(got, x, product.weight, max(INT8_LIMIT, FLOAT_LIMIT))


def test_nothing_to_do_is_done() -> None:
    assert compute([]) == []
    rounded = round_rows(activations(2, 64))
    assert compute([Product(matrix("Q8_0", 4, 64), rounded.cdata, 0)])[0].shape == (0, 4)


def test_no_columns_give_zeros() -> None:
    weight = QuantMatrix(BLOCK_TYPES["Q8_0"], 3, 0, torch.zeros(3, 0, dtype=torch.uint8))
    x = np.zeros((2, 0), dtype=np.float32)
    for record in (make_input(x), round_rows(x).cdata):
        (got,) = compute([Product(weight, record, 2)])
        assert got.tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("name", [*INT8_TYPES, "F32", "BF16"])
@pytest.mark.parametrize("columns", [256, 1536, 1792])
def test_a_token_alone_has_the_bits_it_has_in_a_batch(name: str, columns: int) -> None:
    weight = matrix(name, 21, columns)
    x = activations(16, columns)
    rows = [compute([Product(weight, round_rows(x[t : t + 1]).cdata, 1)])[0] for t in range(16)]
    alone = np.concatenate(rows)
    for tokens in (2, 3, 7, 16):
        record = round_rows(x[:tokens]).cdata
        (got,) = compute([Product(weight, record, tokens)], is_small=True)
        np.testing.assert_array_equal(got.view(np.int32), alone[:tokens].view(np.int32))


def test_every_index_and_sign_of_a_grid_is_multiplied() -> None:
    """Enough blocks that each entry of IQ2_XXS stands somewhere, and each pattern of signs."""
    weight = matrix("IQ2_XXS", 48, 4096)
    groups = weight.data.view(-1, 66)[:, 2:].reshape(-1, 8)
    signs = groups[:, 4:].contiguous().view(torch.int32)
    assert len(groups[:, :4].unique()) == 256
    assert len((signs & 127).unique()) == 128
    for tokens in (1, 5):
        rounded = round_rows(activations(tokens, 4096))
        (got,) = compute([Product(weight, rounded.cdata, tokens)])
        assert_product(got, rounded.values(), weight, INT8_LIMIT)


@pytest.mark.parametrize("columns", [8192, 8448])
def test_rows_of_a_grid_may_be_longer_than_what_is_reordered(columns: int) -> None:
    weight = matrix("IQ2_XXS", 5, columns)
    rounded = round_rows(activations(3, columns))
    (got,) = compute([Product(weight, rounded.cdata, 3)])
    assert_product(got, rounded.values(), weight, INT8_LIMIT)


@pytest.mark.parametrize("name", [name for name in INT8_TYPES if name in native_products.HALVES])
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_bad_scale_of_a_superblock_makes_its_column_bad_and_no_other(
    name: str, tokens: int
) -> None:
    weight = matrix(name, 18, 768)
    start = BLOCK_TYPES[name].row_bytes(256) + native_products.HALVES[name][0]
    weight.data[5, start : start + 2] = torch.tensor([0, 0x7E], dtype=torch.uint8)
    (got,) = compute([Product(weight, round_rows(activations(tokens, 768)).cdata, tokens)])
    assert np.isnan(got[:, 5]).all()
    assert np.isfinite(np.delete(got, 5, axis=1)).all()


@pytest.mark.parametrize("scale", [0, 1, 2, 250])
def test_every_power_of_two_scales_a_superblock(scale: int) -> None:
    """Ends of what E8M0 is used for, with activations that keep the products in range."""
    weight = matrix("MXFP4", 5, 256)
    weight.data.view(5, -1, 17)[:, :, 0] = scale
    x = activations(3, 256) * np.float32(2.0 ** (96 if scale < 3 else -32))
    rounded = round_rows(x)
    (got,) = compute([Product(weight, rounded.cdata, 3)])
    assert_product(got, rounded.values(), weight, INT8_LIMIT)


@pytest.mark.parametrize("columns", [256, 1792, 4096])
def test_look_ups_and_permutations_give_the_same_bits(isa: int, columns: int) -> None:
    """Of IQ2_XXS, with registers of 256 bits and with permutations of bytes."""
    lib, ffi = library()
    if ffi.string(lib.dk_isa_name(isa)).decode() not in SAME_GRID_BITS:
        return
    product = Product(matrix("IQ2_XXS", 21, columns), round_rows(activations(3, columns)).cdata, 3)
    (got,) = compute([product])
    lib.dk_set_isa(1)
    (expected,) = compute([product])
    np.testing.assert_array_equal(got.view(np.int32), expected.view(np.int32))


def test_float_products_are_invariant_for_any_number_of_tokens() -> None:
    weight, x = matrix("F16", 21, 700), activations(130, 700)
    rows = [compute([Product(weight, make_input(x[t : t + 1]), 1)])[0] for t in range(130)]
    (got,) = compute([Product(weight, make_input(x), 130)])
    np.testing.assert_array_equal(got.view(np.int32), np.concatenate(rows).view(np.int32))


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("name", ["Q8_0", "NVFP4", "F16"])
def test_threads_do_not_change_a_bit(name: str, tokens: int) -> None:
    weight = matrix(name, 517, 1024)
    record = round_rows(activations(tokens, 1024)).cdata
    (one,) = compute([Product(weight, record, tokens)])
    for threads in (2, 5):
        (got,) = compute([Product(weight, record, tokens)], threads=threads)
        np.testing.assert_array_equal(got.view(np.int32), one.view(np.int32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tokens", [2, 20])
@pytest.mark.parametrize(
    ("name", "columns"),
    [("Q8_0", 320), ("NVFP4", 320), ("F32", 320), ("NVFP4", 512), ("MXFP4", 512), ("Q4_K", 512)],
)
def test_a_bad_activation_makes_its_row_nan_and_no_other(
    name: str, columns: int, tokens: int, bad: float
) -> None:
    x = activations(tokens, columns)
    x[1, 300] = bad
    (got,) = compute([Product(matrix(name, 18, columns), round_rows(x).cdata, tokens)])
    assert not np.isfinite(got[1]).any()
    assert np.isfinite(np.delete(got, 1, axis=0)).all()


@pytest.mark.parametrize("tokens", [2, 20])
@pytest.mark.parametrize("rounds", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "FP4_E2M1", "F32", "FP8_E4M3"])
def test_a_bad_weight_makes_its_column_bad_and_no_other(
    name: str, rounds: bool, tokens: int
) -> None:
    weight = matrix(name, 18, 320)
    if name == "FP4_E2M1":
        assert weight.scale is not None
        weight.scale[5, 3] = 255
    elif name == "FP8_E4M3":
        weight.data[5, 100] = 0x7F
    else:
        block = {"Q8_0": 34, "Q4_0": 18, "F32": 128}[name]
        bits = [0, 0, 0xC0, 0x7F] if name == "F32" else [0, 0x7E]
        place = slice(3 * block, 3 * block + len(bits))
        weight.data[5, place] = torch.tensor(bits, dtype=torch.uint8)
    x = activations(tokens, 320)
    record = round_rows(x).cdata if rounds else make_input(x)
    (got,) = compute([Product(weight, record, tokens)])
    assert np.isnan(got[:, 5]).all()
    assert np.isfinite(np.delete(got, 5, axis=1)).all()


def test_a_list_longer_than_one_round_is_finished() -> None:
    weight = matrix("F32", 3, 16)
    x = activations(1, 16)
    products = [Product(weight, make_input(x), 1) for _ in range(600)]
    for got in compute(products, threads=2):
        assert_product(got, x, weight, FLOAT_LIMIT)


def test_the_module_of_matrices_gives_finite_numbers_for_all_types() -> None:
    for name in (*INT8_TYPES, *FLOAT_TYPES):
        weight = matrix(name, 3, 256)
        assert torch.isfinite(native_products.dequantize(weight)).all(), name
