"""Products with stored matrices equal the float64 product of the decoded numbers."""

from __future__ import annotations

import warnings

import gguf
import numpy as np
import pytest
import torch

from edgedsv4.errors import BackendUnavailableError, ShapeError, UnsupportedModelError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels import quant_matmul as module
from edgedsv4.kernels.native.library import library
from edgedsv4.kernels.quant_matmul import (
    INT8_TYPES,
    QuantMatrix,
    dequantize,
    matrix_from_numpy,
    quant_matmul,
    round_activations,
    tensor_from_numpy,
)

LIMITS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3.3e-3}
BACKENDS = ("reference", "native")
TYPES = ["F32", "F16", "BF16", "F64", "Q8_0", "MXFP4", "Q4_K", "Q2_K", "IQ2_XXS", "NVFP4"]


def stored(name: str, rows: int, columns: int, seed: int = 1) -> np.ndarray:
    """Bytes of a matrix with finite numbers of moderate size."""
    generator = np.random.default_rng(seed)
    block_type = BLOCK_TYPES[name]
    if name in ("F32", "F16", "F64"):
        values = generator.standard_normal((rows, columns)).astype(
            "<f" + str(block_type.block_bytes)
        )
        return values.view(np.uint8)
    if name in ("BF16", "Q8_0", "MXFP4"):
        values = generator.standard_normal((rows, columns)).astype(np.float32)
        return gguf.quantize(values, gguf.GGMLQuantizationType[name])
    blocks = columns // block_type.block_elements
    data = generator.integers(0, 256, (rows, blocks, block_type.block_bytes), dtype=np.uint8)
    halves = {"Q4_K": (0, 2), "Q2_K": (80, 82), "IQ2_XXS": (0,)}.get(name, ())
    for start in halves:
        data[:, :, start : start + 2] = np.array([1.0], dtype="<f2").view(np.uint8)
    if name == "NVFP4":
        data[:, :, :4] = 0x38
    return data.reshape(rows, -1)


def matrix(name: str, rows: int, columns: int) -> QuantMatrix:
    return matrix_from_numpy(stored(name, rows, columns), BLOCK_TYPES[name], rows, columns)


def assert_close(got: torch.Tensor, reference: torch.Tensor) -> None:
    assert got.shape == reference.shape
    error = (got.double() - reference).norm() / reference.norm().clamp(min=1e-30)
    assert error <= LIMITS[got.dtype]


def assert_is_product(x: torch.Tensor, weight: QuantMatrix) -> None:
    rounded = dequantize(weight, torch.float64).to(x.dtype).double()
    for backend in BACKENDS if x.dtype == torch.float32 else ("reference",):
        got = quant_matmul(x, weight, backend=backend)
        assert got.dtype == x.dtype
        assert_close(got, x.double() @ rounded.T)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", TYPES)
def test_product_equals_the_float64_one(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 512, generator=generator, dtype=torch.float64).to(dtype)
    assert_is_product(x, matrix(name, 37, 512))


@pytest.mark.parametrize("rows", [1, 2, 65])
@pytest.mark.parametrize("leading", [(), (1,), (7,), (2, 3)])
def test_any_number_of_rows_and_leading_dims(rows: int, leading: tuple[int, ...]) -> None:
    x = torch.randn(*leading, 96, generator=torch.Generator().manual_seed(3))
    assert_is_product(x, matrix("Q8_0", rows, 96))


@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0"])
def test_a_matrix_of_several_tiles_gives_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch, nan_filled_memory: None
) -> None:
    assert nan_filled_memory is None
    weight = matrix(name, 41, 96)
    whole = dequantize(weight, torch.float64)
    monkeypatch.setattr(module, "TILE_ELEMENTS", 7 * 96)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    assert torch.equal(dequantize(weight, torch.float64), whole)
    assert_close(quant_matmul(x, weight), x @ whole.T)


def test_a_strided_x_is_read_by_its_strides() -> None:
    x = torch.randn(64, 9, generator=torch.Generator().manual_seed(5)).T
    assert_is_product(x[::2], matrix("Q8_0", 11, 64))


@pytest.mark.parametrize(("rows", "tokens"), [(0, 3), (4, 0), (0, 0)])
def test_nothing_times_something_is_empty(rows: int, tokens: int) -> None:
    got = quant_matmul(torch.zeros(tokens, 64), matrix("Q8_0", rows, 64))
    assert got.shape == (tokens, rows)


def test_no_columns_give_zeros() -> None:
    weight = QuantMatrix(BLOCK_TYPES["Q8_0"], 3, 0, torch.zeros(3, 0, dtype=torch.uint8))
    assert quant_matmul(torch.zeros(2, 0), weight).tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_float_tensor_is_a_weight_too(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(13, 40, generator=generator).to(torch.float16)
    x = torch.randn(4, 40, generator=generator).to(dtype)
    assert_close(quant_matmul(x, weight), x.double() @ weight.to(dtype).double().T)


def test_the_tensor_scale_multiplies_every_element() -> None:
    plain = matrix("NVFP4", 3, 128)
    scaled = matrix_from_numpy(stored("NVFP4", 3, 128), BLOCK_TYPES["NVFP4"], 3, 128, None, 0.5)
    assert torch.equal(dequantize(scaled), dequantize(plain) * 0.5)


def test_the_tensor_scale_applies_to_float_types() -> None:
    weight = matrix_from_numpy(stored("F32", 3, 5), BLOCK_TYPES["F32"], 3, 5, None, 2.0)
    assert torch.equal(dequantize(weight), dequantize(matrix("F32", 3, 5)) * 2)


def test_f32_weights_are_used_where_they_lie() -> None:
    data = np.frombuffer(stored("F32", 6, 10).tobytes(), dtype=np.uint8)
    weight = matrix_from_numpy(data, BLOCK_TYPES["F32"], 6, 10)
    assert dequantize(weight).data_ptr() == data.ctypes.data
    assert dequantize(weight, rows=slice(2, 4)).data_ptr() == data.ctypes.data + 2 * 40


def test_float_tensors_are_used_where_they_lie() -> None:
    numbers = torch.ones(2, 3, dtype=torch.bfloat16)
    weight = QuantMatrix(BLOCK_TYPES["BF16"], 2, 3, numbers)
    assert dequantize(weight, torch.bfloat16).data_ptr() == numbers.data_ptr()


@pytest.mark.parametrize("shift", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "F64", "Q8_0", "Q4_K"])
def test_weights_at_any_address_give_the_same(name: str, shift: int) -> None:
    data = stored(name, 5, 256)
    moved = np.zeros(data.size + shift, dtype=np.uint8)
    moved[shift:] = data.reshape(-1)
    weight = matrix_from_numpy(moved[shift:], BLOCK_TYPES[name], 5, 256)
    reference = matrix_from_numpy(data, BLOCK_TYPES[name], 5, 256)
    assert torch.equal(dequantize(weight), dequantize(reference))
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(7))
    assert torch.equal(quant_matmul(x, weight), quant_matmul(x, reference))


def test_rows_of_a_wider_tensor_are_read_by_their_stride() -> None:
    data = torch.from_numpy(stored("Q8_0", 4, 128))
    part = QuantMatrix(BLOCK_TYPES["Q8_0"], 4, 64, data[:, 68:])
    whole = QuantMatrix(BLOCK_TYPES["Q8_0"], 4, 128, data)
    assert torch.equal(dequantize(part), dequantize(whole)[:, 64:])


def test_read_only_memory_is_used_without_a_copy_or_a_warning() -> None:
    data = np.frombuffer(bytes(range(64)), dtype=np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = tensor_from_numpy(data)
    assert tensor.data_ptr() == data.ctypes.data
    assert not data.flags.writeable


def test_the_tensor_keeps_read_only_memory_alive() -> None:
    tensor = tensor_from_numpy(np.frombuffer(bytes([7]) * 100_000, dtype=np.uint8))
    noise = [bytes([9]) * 100_000 for _ in range(20)]
    assert len(noise) == 20
    assert (tensor == 7).all()


def test_an_empty_read_only_array_becomes_an_empty_tensor() -> None:
    assert tensor_from_numpy(np.frombuffer(b"x", dtype=np.uint8)[:0]).shape == (0,)


@pytest.mark.parametrize("rows", [slice(2, 5), slice(None, 3), slice(-2, None), slice(4, 2)])
@pytest.mark.parametrize("name", ["Q8_0", "F32", "F16"])
def test_a_range_of_rows_is_decoded_alone(name: str, rows: slice) -> None:
    weight = matrix(name, 7, 64)
    assert torch.equal(dequantize(weight, rows=rows), dequantize(weight)[rows])


def test_rows_with_a_step_are_refused() -> None:
    with pytest.raises(ShapeError, match="step"):
        dequantize(matrix("Q8_0", 4, 32), rows=slice(0, 4, 2))


def fp8(rows: int, columns: int, block: int, seed: int = 8) -> tuple[QuantMatrix, np.ndarray]:
    """A block-scaled FP8 matrix, and its numbers from the definition, element by element."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 256, (rows, columns), dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    shape = (-(-rows // block), -(-columns // block))
    scale = generator.integers(100, 150, shape, dtype=np.uint8)
    exponent, mantissa = (codes >> 3 & 15).astype(float), (codes & 7).astype(float)
    numbers = np.where(exponent == 0, mantissa / 512, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    numbers = np.where(codes & 0x80, -numbers, numbers)
    row, column = np.indices(codes.shape) // block
    numbers *= 2.0 ** (scale[row, column].astype(float) - 127)
    return matrix_from_numpy(codes, BLOCK_TYPES["FP8_E4M3"], rows, columns, scale), numbers


@pytest.mark.parametrize("block", [128, 32])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (128, 256), (129, 300), (33, 100), (300, 31)]
)
def test_fp8_block_scales_follow_from_the_shapes(rows: int, columns: int, block: int) -> None:
    weight, numbers = fp8(rows, columns, block)
    np.testing.assert_array_equal(dequantize(weight, torch.float64).numpy(), numbers)


def test_fp8_scales_fit_every_range_of_rows() -> None:
    weight, numbers = fp8(300, 70, 128)
    for start, stop in ((0, 300), (5, 7), (127, 129), (250, 300), (128, 256)):
        got = dequantize(weight, torch.float64, rows=slice(start, stop))
        np.testing.assert_array_equal(got.numpy(), numbers[start:stop])


def test_fp8_scales_cover_the_whole_range_of_e8m0() -> None:
    data = np.full((3, 32), 0x38, dtype=np.uint8)  # 1.0
    for code, value in ((0, 2.0**-127), (1, 2.0**-126), (254, 2.0**127), (255, np.nan)):
        scale = np.full((1, 1), code, dtype=np.uint8)
        weight = matrix_from_numpy(data, BLOCK_TYPES["FP8_E4M3"], 3, 32, scale)
        np.testing.assert_array_equal(dequantize(weight, torch.float64), np.full((3, 32), value))


def test_fp4_has_a_scale_per_32_elements_of_a_row() -> None:
    generator = np.random.default_rng(9)
    codes = generator.integers(0, 256, (5, 48), dtype=np.uint8)
    scale = generator.integers(100, 150, (5, 3), dtype=np.uint8)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    numbers = np.stack((values[codes & 15], values[codes >> 4]), axis=2).reshape(5, 96)
    numbers *= np.repeat(2.0 ** (scale.astype(float) - 127), 32, axis=1)
    weight = matrix_from_numpy(codes, BLOCK_TYPES["FP4_E2M1"], 5, 96, scale)
    np.testing.assert_array_equal(dequantize(weight, torch.float64).numpy(), numbers)
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(10))
    assert_is_product(x, weight)


def test_packed_fp4_equals_its_mxfp4_repack() -> None:
    generator = np.random.default_rng(11)
    codes = generator.integers(0, 16, (3, 2, 32), dtype=np.uint8)
    scale = generator.integers(100, 150, (3, 2), dtype=np.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    planes = codes[..., :16] | codes[..., 16:] << 4
    ours = matrix_from_numpy(packed, BLOCK_TYPES["FP4_E2M1"], 3, 64, scale)
    blocks = np.concatenate((scale[..., None], planes), axis=2)
    theirs = matrix_from_numpy(blocks, BLOCK_TYPES["MXFP4"], 3, 64)
    assert torch.equal(dequantize(ours), dequantize(theirs))


def test_the_workspace_stays_small_next_to_a_large_matrix() -> None:
    weight = matrix("Q8_0", 64, 1 << 16)  # 16 MiB decoded
    sizes: list[int] = []
    real = module._decode_rows

    def spy(weight: QuantMatrix, first: int, last: int) -> torch.Tensor:
        sizes.append((last - first) * weight.columns)
        return real(weight, first, last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_decode_rows", spy)
        quant_matmul(torch.ones(1, 1 << 16), weight, backend="reference")
    assert sum(sizes) == 64 << 16
    assert max(sizes) * 8 <= 64 << 20


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.zeros(2, 31), matrix("Q8_0", 3, 32)),
        (torch.zeros(2, 32, dtype=torch.int32), matrix("Q8_0", 3, 32)),
        (torch.zeros(()), matrix("Q8_0", 3, 32)),
        (torch.zeros(2, 4), torch.zeros(3, 5)),
        (torch.zeros(2, 4), torch.zeros(4)),
        (torch.zeros(2, 4), torch.zeros(3, 4, dtype=torch.int8)),
    ],
    ids=["width", "integer x", "scalar x", "tensor width", "vector weight", "integer weight"],
)
def test_operands_that_do_not_fit_are_refused(
    x: torch.Tensor, weight: QuantMatrix | torch.Tensor
) -> None:
    with pytest.raises(ShapeError):
        quant_matmul(x, weight)


def u8(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "rows", "columns", "data", "scale"),
    [
        ("Q8_0", 2, 33, u8(2, 34), None),
        ("Q8_0", 2, 32, u8(2, 33), None),
        ("Q8_0", 3, 32, u8(2, 34), None),
        ("Q8_0", 2, 32, torch.zeros(2, 32), None),
        ("F16", 2, 4, torch.zeros(2, 4), None),
        ("Q8_0", 2, 32, u8(2, 34), u8(1, 1)),
        ("FP8_E4M3", 200, 64, u8(200, 64), None),
        ("FP8_E4M3", 200, 64, u8(200, 64), u8(2, 2)),
        ("FP8_E4M3", 200, 64, u8(200, 64), u8(7, 1)),
        ("FP8_E4M3", 200, 64, u8(200, 64), u8(2)),
        ("FP8_E4M3", 200, 64, u8(200, 64), torch.zeros(2, 1)),
        ("FP4_E2M1", 2, 64, u8(2, 32), u8(2, 1)),
        ("FP4_E2M1", 2, 48, u8(2, 24), u8(2, 1)),
        ("FP4_E2M1", 2, 64, u8(2, 32), None),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    name: str, rows: int, columns: int, data: torch.Tensor, scale: torch.Tensor | None
) -> None:
    with pytest.raises(ShapeError, match=name.replace("FP8_E4M3", "FP8|E8M0")):
        QuantMatrix(BLOCK_TYPES[name], rows, columns, data, scale)


def test_bytes_that_do_not_fill_the_matrix_are_refused() -> None:
    with pytest.raises(ShapeError, match="Q8_0"):
        matrix_from_numpy(np.zeros(33, dtype=np.uint8), BLOCK_TYPES["Q8_0"], 1, 32)
    with pytest.raises(ShapeError, match="multiple of 32"):
        matrix_from_numpy(np.zeros(34, dtype=np.uint8), BLOCK_TYPES["Q8_0"], 1, 31)


def test_types_without_a_decoder_are_refused() -> None:
    weight = QuantMatrix(BLOCK_TYPES["I32"], 2, 2, u8(2, 8))
    with pytest.raises(UnsupportedModelError, match="I32"):
        quant_matmul(torch.zeros(1, 2), weight)


@pytest.mark.parametrize(
    ("backend", "dtype"), [("triton", torch.float32), ("native", torch.float64)]
)
def test_a_backend_that_cannot_run_is_never_replaced(backend: str, dtype: torch.dtype) -> None:
    x = torch.zeros(1, 32, dtype=dtype)
    with pytest.raises(BackendUnavailableError, match=f"quant_matmul.*{backend}"):
        quant_matmul(x, matrix("Q8_0", 1, 32), backend=backend)


def test_auto_takes_the_c_kernels_for_float32_on_the_cpu() -> None:
    x = torch.randn(20, 512, generator=torch.Generator().manual_seed(12))
    weight = matrix("Q4_K", 33, 512)
    assert torch.equal(quant_matmul(x, weight), quant_matmul(x, weight, backend="native"))
    assert not torch.equal(quant_matmul(x, weight), quant_matmul(x, weight, backend="reference"))


def test_columns_apart_in_memory_are_left_to_the_reference() -> None:
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(13)).T
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(14))
    assert_close(quant_matmul(x, weight), x.double() @ weight.double().T)
    with pytest.raises(BackendUnavailableError):
        quant_matmul(x, weight, backend="native")


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("name", ["Q8_0", "NVFP4", "Q4_K"])
def test_int8_activations_are_the_same_for_all_backends(name: str, tokens: int) -> None:
    x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(15))
    weight = matrix(name, 19, 512)
    reference = round_activations(x).double() @ dequantize(weight, torch.float64).T
    for backend in BACKENDS:
        assert_close(quant_matmul(x, weight, backend=backend, activations="int8"), reference)


@pytest.mark.parametrize("backend", BACKENDS)
def test_int8_activations_do_not_change_products_of_other_types(backend: str) -> None:
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(16))
    weight = matrix("F16", 7, 96)
    got = quant_matmul(x, weight, backend=backend, activations="int8")
    assert torch.equal(got, quant_matmul(x, weight, backend=backend))


def test_the_list_of_int8_types_is_that_of_the_c_kernels() -> None:
    lib, _ = library()
    numbers = {name: lib.dk_type_id(name.encode()) for name in BLOCK_TYPES}
    assert {name for name, n in numbers.items() if n >= 0 and lib.dk_type_has_int8(n)} - {"F4"} == (
        INT8_TYPES
    )


def test_rounded_activations_are_within_half_a_step_and_bad_groups_nan() -> None:
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(17), dtype=torch.float64)
    x[1, 32:64] = 2.0**-120
    x[2, 70] = torch.inf
    rounded = round_activations(x)
    steps = x.view(3, 3, 32).abs().amax(2, keepdim=True) / 127
    error = (rounded - x).view(3, 3, 32).abs()
    assert rounded.dtype == x.dtype
    assert (error <= steps * (0.5 + 1e-5) + 2.0**-110)[torch.isfinite(error)].all()
    assert (rounded[1, 32:64] == 0).all()
    assert rounded[2, 64:].isnan().all()
    assert rounded.isfinite().sum() == 8 * 32
