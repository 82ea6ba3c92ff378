"""Every block decoder equals gguf-py's bit for bit, on any bytes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from edgedsv4.errors import ShapeError, UnsupportedModelError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.dequantize import DECODABLE_TYPES, decode_blocks

GGML_TYPES = sorted(
    name
    for name in DECODABLE_TYPES
    if BLOCK_TYPES[name].ggml_id is not None and name not in ("F32", "F16", "F64")
)
# f16 bits: zeros, smallest and largest subnormal, smallest and largest normal, infinities, NaNs.
ODD_HALVES = (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0xFD01)


def random_blocks(name: str, count: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (count, BLOCK_TYPES[name].block_bytes), dtype=np.uint8)


def expected(blocks: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])


def assert_same_bits(got: torch.Tensor, reference: np.ndarray) -> None:
    """Equal bit for bit; where the reference is NaN, any NaN will do."""
    assert got.dtype == torch.float32
    assert got.shape == reference.shape
    mine, nan = got.numpy(), np.isnan(reference)
    np.testing.assert_array_equal(np.isnan(mine), nan)
    np.testing.assert_array_equal(mine.view(np.int32)[~nan], reference.view(np.int32)[~nan])


def decode(blocks: np.ndarray, name: str) -> torch.Tensor:
    return decode_blocks(torch.from_numpy(blocks), BLOCK_TYPES[name])


def test_every_type_that_gguf_decodes_is_decoded() -> None:
    theirs = {kind.name for kind in gguf.quants._type_traits}
    assert theirs | {"F32", "F16"} <= DECODABLE_TYPES


@pytest.mark.parametrize("count", [1, 7, 129])
@pytest.mark.parametrize("name", GGML_TYPES)
def test_random_bytes_decode_as_in_gguf(name: str, count: int) -> None:
    blocks = random_blocks(name, count)
    assert_same_bits(decode(blocks, name), expected(blocks, name))


@pytest.mark.parametrize(
    "name", [n for n in GGML_TYPES if n not in ("MXFP4", "NVFP4", "IQ1_M", "BF16")]
)
def test_odd_half_precision_scales_decode_as_in_gguf(name: str) -> None:
    blocks = random_blocks(name, len(ODD_HALVES) * 4)
    halves = np.array(ODD_HALVES * 4, dtype="<u2").view(np.uint8).reshape(-1, 2)
    size = blocks.shape[1]
    for start in (0, 2, size - 4, size - 2):  # wherever a type keeps its scales
        blocks[:, start : start + 2] = halves[:: 1 if start % 4 == 0 else -1]
        assert_same_bits(decode(blocks, name), expected(blocks, name))


def test_odd_scales_of_iq1_m_decode_as_in_gguf() -> None:
    blocks = random_blocks("IQ1_M", len(ODD_HALVES))
    words = blocks[:, 48:].view("<u2")
    nibbles = np.array(ODD_HALVES)[:, None] >> np.array([0, 4, 8, 12]) & 15
    words[:] = (words & 0x0FFF) | (nibbles << 12)
    assert_same_bits(decode(blocks, "IQ1_M"), expected(blocks, "IQ1_M"))


def test_every_mxfp4_exponent_and_code_decodes_as_in_gguf() -> None:
    blocks = np.zeros((256, 17), dtype=np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = np.arange(16) * 17
    assert_same_bits(decode(blocks, "MXFP4"), expected(blocks, "MXFP4"))


@pytest.mark.parametrize(("exponent", "scale"), [(0, 2.0**-127), (1, 2.0**-126), (127, 1.0)])
def test_mxfp4_scale_is_a_power_of_two_down_to_the_subnormals(exponent: int, scale: float) -> None:
    blocks = np.full((1, 17), 0x72, dtype=np.uint8)  # low nibble 1.0, high nibble 6.0
    blocks[0, 0] = exponent
    got = decode(blocks, "MXFP4")[0].double()
    assert got.tolist() == [scale] * 16 + [6 * scale] * 16


def test_every_nvfp4_scale_and_code_decodes_as_in_gguf() -> None:
    blocks = np.zeros((256, 36), dtype=np.uint8)
    blocks[:, :4] = np.arange(256)[:, None]
    blocks[:, 4:] = np.tile(np.arange(16) * 17, 2)
    assert_same_bits(decode(blocks, "NVFP4"), expected(blocks, "NVFP4"))


@pytest.mark.parametrize("name", GGML_TYPES)
def test_blocks_at_odd_addresses_and_strides_decode_alike(name: str) -> None:
    blocks = random_blocks(name, 9)
    padded = np.zeros((9, blocks.shape[1] + 3), dtype=np.uint8)
    padded[:, 1:-2] = blocks
    view = torch.from_numpy(padded)[:, 1:-2]
    assert_same_bits(decode_blocks(view, BLOCK_TYPES[name]), expected(blocks, name))


@pytest.mark.parametrize("name", sorted(DECODABLE_TYPES))
@pytest.mark.usefixtures("nan_filled_memory")
def test_decoding_writes_every_element_and_leaves_its_input(name: str) -> None:
    blocks = np.zeros((5, BLOCK_TYPES[name].block_bytes), dtype=np.uint8)
    got = decode(blocks, name)
    assert got.shape == (5, BLOCK_TYPES[name].block_elements)
    assert torch.isfinite(got).all()
    assert not blocks.any()


@pytest.mark.parametrize("name", sorted(DECODABLE_TYPES))
def test_no_blocks_give_no_elements(name: str) -> None:
    got = decode(random_blocks(name, 0), name)
    assert got.shape == (0, BLOCK_TYPES[name].block_elements)


@pytest.mark.parametrize(("name", "dtype"), [("F32", "<f4"), ("F16", "<f2"), ("F64", "<f8")])
def test_ieee_types_decode_as_numpy_reads_them(name: str, dtype: str) -> None:
    blocks = random_blocks(name, 333)
    with np.errstate(all="ignore"):
        assert_same_bits(decode(blocks, name), blocks.view(dtype).astype(np.float32))


def e4m3(code: int) -> float:
    """OCP E4M3 "fn" by its definition."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    return sign * (
        mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )


def test_fp8_e4m3_follows_the_ocp_definition() -> None:
    codes = np.arange(256, dtype=np.uint8)
    reference = np.array([e4m3(code) for code in range(256)], dtype=np.float32)
    assert_same_bits(decode(codes[:, None], "FP8_E4M3"), reference[:, None])


def test_fp8_e5m2_is_the_upper_byte_of_a_half() -> None:
    codes = np.arange(256, dtype=np.uint8)
    reference = (codes.astype("<u2") << 8).view("<f2").astype(np.float32)
    assert_same_bits(decode(codes[:, None], "FP8_E5M2"), reference[:, None])


def test_e8m0_is_a_power_of_two_and_255_is_nan() -> None:
    codes = np.arange(256, dtype=np.uint8)
    reference = np.array([2.0 ** (b - 127) for b in range(255)] + [np.nan], dtype=np.float32)
    assert_same_bits(decode(codes[:, None], "E8M0"), reference[:, None])


@pytest.mark.parametrize("name", ["FP4_E2M1", "F4"])
def test_fp4_has_element_2i_in_the_low_nibble(name: str) -> None:
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    codes = np.arange(256, dtype=np.uint8)
    reference = np.array([[values[c & 15], values[c >> 4]] for c in range(256)], dtype=np.float32)
    assert_same_bits(decode(codes[:, None], name), reference)


def test_the_stored_grids_are_those_of_gguf() -> None:
    path = Path(__file__).parents[2] / "data" / "make_iq_grids.py"
    spec = importlib.util.spec_from_file_location("make_iq_grids", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with np.load(script.STORED) as stored:
        fresh = script.iq_grids()
        assert set(stored) == set(fresh)
        for name, grid in fresh.items():
            np.testing.assert_array_equal(stored[name], grid)


@pytest.mark.parametrize("name", ["Q8_K", "Q1_0", "I32", "U8", "F6_E2M3"])
def test_types_without_a_decoder_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        decode(random_blocks(name, 1), name)


@pytest.mark.parametrize(
    "data",
    [torch.zeros(34, dtype=torch.uint8), torch.zeros(2, 33, dtype=torch.uint8), torch.zeros(2, 34)],
    ids=["one dim", "wrong width", "not bytes"],
)
def test_data_of_the_wrong_shape_or_dtype_is_refused(data: torch.Tensor) -> None:
    with pytest.raises(ShapeError, match="Q8_0"):
        decode_blocks(data, BLOCK_TYPES["Q8_0"])
