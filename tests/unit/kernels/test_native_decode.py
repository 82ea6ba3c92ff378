"""The C decoders give the bits of the Python ones, for every block type and instruction set."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.dequantize import DECODABLE_TYPES, decode_blocks
from edgedsv4.kernels.native import library
from edgedsv4.kernels.native.library import matrix_of, new_run
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize

# F4 is FP4_E2M1 without scales; `matrix_of` refuses it, a test of its own does not need that.
TYPES = sorted(DECODABLE_TYPES - {"F4"})
# f16 bits: zeros, smallest and largest subnormal, smallest and largest normal, infinities, NaNs.
ODD_HALVES = (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0xFD01)
POISON = -7.25
GUARD = 16


def blocks_of(name: str, count: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (count, BLOCK_TYPES[name].block_bytes), dtype=np.uint8)


def matrix_at(
    address: int,
    name: str,
    rows: int,
    blocks: np.ndarray,
    scale: torch.Tensor | None = None,
    factor: float = 1.0,
) -> QuantMatrix:
    """A matrix of these blocks whose data lies `address` bytes past an aligned one.

    The data ends where its memory ends, so that a sanitizer sees every read past it.
    """
    data = np.empty(address + blocks.size, dtype=np.uint8)[address:]
    data[:] = blocks.reshape(-1)
    columns = len(blocks) // rows * BLOCK_TYPES[name].block_elements
    tensor = torch.from_numpy(data.reshape(rows, -1))
    return QuantMatrix(BLOCK_TYPES[name], rows, columns, tensor, scale, factor)


def decode(matrix: QuantMatrix, row: int, first: int, columns: int) -> np.ndarray:
    """One row by the C decoder; nothing outside the result may be written."""
    memory = np.full(columns + 2 * GUARD, POISON, dtype=np.float32)
    lib, ffi = library.library()
    lib.dk_decode_row(
        ffi.from_buffer("float[]", memory) + GUARD, matrix_of(matrix), row, first, columns
    )
    assert (memory[:GUARD] == POISON).all()
    assert (memory[GUARD + columns :] == POISON).all()
    return memory[GUARD : GUARD + columns]


def assert_same_bits(got: np.ndarray, reference: np.ndarray) -> None:
    """Equal bit for bit; where the reference is NaN, any NaN will do."""
    nan = np.isnan(reference)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.int32)[~nan], reference.view(np.int32)[~nan])


def assert_every_row_decodes(matrix: QuantMatrix) -> None:
    reference = dequantize(matrix).numpy()
    for row in range(matrix.rows):
        assert_same_bits(decode(matrix, row, 0, matrix.columns), reference[row])


def e8m0(shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    """Random scale bytes with the odd ones among them."""
    scale = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    odd = np.array([0, 255, 1, 254], dtype=np.uint8)[: scale.size]
    scale.reshape(-1)[: odd.size] = odd
    return torch.from_numpy(scale)


@pytest.mark.parametrize("name", sorted(DECODABLE_TYPES))
def test_every_decodable_type_has_a_number(name: str) -> None:
    lib, _ = library.library()
    assert lib.dk_type_id(name.encode()) >= 0


@pytest.mark.parametrize("name", ["", "Q8_K", "Q1_0", "I32", "q8_0", "Q8_", "Q8_01"])
def test_other_names_have_no_number(name: str) -> None:
    lib, _ = library.library()
    assert lib.dk_type_id(name.encode()) == -1


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("per_row", [1, 3, 37])
@pytest.mark.parametrize("name", TYPES)
def test_random_bytes_decode_as_in_python(name: str, per_row: int) -> None:
    if name in ("FP4_E2M1", "FP8_E4M3"):
        per_row *= 16  # FP4 has a scale per 32 elements
        columns = per_row * BLOCK_TYPES[name].block_elements
        shape = (5, columns // 32) if name == "FP4_E2M1" else (1, -(-columns // 128))
        scale = e8m0(shape)
    else:
        scale = None
    assert_every_row_decodes(matrix_at(0, name, 5, blocks_of(name, 5 * per_row), scale))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("address", [1, 2, 33])
@pytest.mark.parametrize("name", [n for n in TYPES if n not in ("FP4_E2M1", "FP8_E4M3")])
def test_blocks_at_any_address_decode_alike(name: str, address: int) -> None:
    assert_every_row_decodes(matrix_at(address, name, 3, blocks_of(name, 3 * 19, seed=2)))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("start", ["first", "third", "before last", "last"])
@pytest.mark.parametrize(
    "name", [n for n in TYPES if BLOCK_TYPES[n].block_bytes > 4 and n not in ("NVFP4", "F64")]
)
def test_odd_half_precision_scales_decode_as_in_python(name: str, start: str) -> None:
    blocks = blocks_of(name, 40)
    size = blocks.shape[1]
    at = {"first": 0, "third": 2, "before last": size - 4, "last": size - 2}[start]
    blocks[:, at : at + 2] = np.array(ODD_HALVES * 4, dtype="<u2").view(np.uint8).reshape(-1, 2)
    assert_every_row_decodes(matrix_at(0, name, 4, blocks))


@pytest.mark.usefixtures("isa")
def test_odd_scales_of_iq1_m_decode_as_in_python() -> None:
    blocks = blocks_of("IQ1_M", len(ODD_HALVES))
    words = blocks[:, 48:].view("<u2")
    nibbles = np.array(ODD_HALVES)[:, None] >> np.array([0, 4, 8, 12]) & 15
    words[:] = (words & 0x0FFF) | (nibbles << 12)
    assert_every_row_decodes(matrix_at(0, "IQ1_M", 2, blocks))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("name", "scales"), [("MXFP4", 1), ("NVFP4", 4)])
def test_every_scale_byte_and_code_decodes_as_in_python(name: str, scales: int) -> None:
    blocks = np.zeros((256, BLOCK_TYPES[name].block_bytes), dtype=np.uint8)
    blocks[:, :scales] = np.arange(256)[:, None]
    blocks[:, scales:] = np.tile(np.arange(16) * 17, (blocks.shape[1] - scales) // 16)
    assert_every_row_decodes(matrix_at(0, name, 4, blocks))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_all_16_bit_floats_decode_as_in_python(name: str) -> None:
    blocks = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2)
    assert_every_row_decodes(matrix_at(0, name, 1, blocks))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", ["FP8_E4M3", "FP8_E5M2", "E8M0"])
def test_all_byte_codes_decode_as_in_python(name: str) -> None:
    blocks = np.arange(256, dtype=np.uint8)[:, None]
    scale = torch.tensor([[0, 255]], dtype=torch.uint8) if name == "FP8_E4M3" else None
    assert_every_row_decodes(matrix_at(0, name, 1, blocks, scale))


@pytest.mark.usefixtures("isa")
def test_packed_fp4_without_scales_decodes_as_in_python() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    lib, ffi = library.library()
    matrix = ffi.new("dk_matrix *")
    matrix.type = lib.dk_type_id(b"F4")
    matrix.data = library.pointer(codes)
    matrix.factor = 1.0
    got = torch.full((512,), torch.nan)
    lib.dk_decode_row(library.pointer(got), matrix, 0, 0, 512)
    reference = decode_blocks(codes[:, None], BLOCK_TYPES["F4"]).view(-1)
    assert_same_bits(got.numpy(), reference.numpy())


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("power", [0, 1, 119, 127, 254, 255])
@pytest.mark.parametrize("name", ["FP8_E4M3", "FP4_E2M1"])
def test_every_code_takes_every_kind_of_scale(name: str, power: int) -> None:
    blocks = np.arange(256, dtype=np.uint8)[:, None]
    columns = 256 * BLOCK_TYPES[name].block_elements
    shape = (1, columns // 32) if name == "FP4_E2M1" else (1, columns // 128)
    scale = torch.full(shape, power, dtype=torch.uint8)
    assert_every_row_decodes(matrix_at(0, name, 1, blocks, scale))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    ("rows", "columns", "shape"),
    [(130, 300, (2, 3)), (33, 77, (2, 3)), (33, 129, (2, 5)), (257, 1, (3, 1)), (1, 128, (1, 1))],
)
def test_fp8_scales_belong_to_squares(rows: int, columns: int, shape: tuple[int, int]) -> None:
    blocks = blocks_of("FP8_E4M3", rows * columns)
    assert_every_row_decodes(matrix_at(3, "FP8_E4M3", rows, blocks, e8m0(shape)))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", TYPES)
def test_a_part_of_a_row_has_the_bits_of_the_whole(name: str) -> None:
    elements = BLOCK_TYPES[name].block_elements
    per_row = 9 if elements >= 32 else 352 // elements
    columns = per_row * elements
    shapes = {"FP4_E2M1": (2, columns // 32), "FP8_E4M3": (1, -(-columns // 128))}
    scale = e8m0(shapes[name]) if name in shapes else None
    matrix = matrix_at(5, name, 2, blocks_of(name, 2 * per_row, seed=3), scale)
    whole = dequantize(matrix).numpy()[1]
    for first, count in ((0, 1), (1, 1), (2, per_row - 2), (per_row - 1, 1), (3, 4), (0, 0)):
        part = decode(matrix, 1, first * elements, count * elements)
        assert_same_bits(part, whole[first * elements : (first + count) * elements])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", TYPES)
def test_the_factor_is_applied_last(name: str) -> None:
    elements = BLOCK_TYPES[name].block_elements
    per_row = 3 if elements >= 32 else 64 // elements
    shapes = {"FP4_E2M1": (2, 2), "FP8_E4M3": (1, 1)}
    scale = e8m0(shapes[name]) if name in shapes else None
    factor = float(np.float32(0.7))
    assert_every_row_decodes(
        matrix_at(0, name, 2, blocks_of(name, 2 * per_row, seed=4), scale, factor)
    )


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("name", "per_row"), [("Q4_K", 2), ("BF16", 33)])
def test_embedding_rows_are_the_rows_of_the_matrix(name: str, per_row: int, threads: int) -> None:
    matrix = matrix_at(1, name, 40, blocks_of(name, 40 * per_row, seed=5))
    ids = torch.from_numpy(np.random.default_rng(6).integers(0, 40, 501))
    memory = torch.full((len(ids) * matrix.columns + GUARD,), torch.nan)
    lib, ffi = library.library()
    run = new_run(threads)
    run.check(
        lib.dk_embed(
            run.cdata,
            library.pointer(memory),
            matrix_of(matrix),
            ffi.cast("int64_t *", ids.data_ptr()),
            len(ids),
        )
    )
    assert memory[-GUARD:].isnan().all()
    got = memory[:-GUARD].view(len(ids), -1).numpy()
    assert_same_bits(got, dequantize(matrix).numpy()[ids.numpy()])


def test_the_c_grids_are_made_from_the_stored_ones() -> None:
    path = Path(__file__).parents[2] / "data" / "make_iq_tables.py"
    spec = importlib.util.spec_from_file_location("make_iq_tables", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.STORED.read_text(encoding="utf-8") == script.iq_tables()
