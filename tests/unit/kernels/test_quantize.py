"""Encoders write blocks that decode to little error: no more than llama.cpp's quantizers leave."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from quantize_tensors import Sample, samples, weighted_error

from edgedsv4.errors import NumericError, ShapeError, UnsupportedModelError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.dequantize import decode_blocks
from edgedsv4.kernels.quantize import ENCODABLE_TYPES, encode_blocks, quantize

REFERENCE = Path(__file__).parents[2] / "data" / "quantize" / "reference.json"
TYPES = ("Q8_0", "MXFP4", "Q4_K", "Q6_K", "Q2_K")
K_TYPES = ("Q4_K", "Q6_K", "Q2_K")
SAMPLES = (
    "gaussian",
    "student-t4",
    "embed.weight",
    "layers.1.attn.wq_b.weight",
    "layers.3.attn.compressor.wkv.weight",
    "layers.2.ffn.experts.5.w2.weight",
    "layers.0.ffn.shared_experts.w1.weight",
)
WORST_RATIO = 1.05


@cache
def all_samples() -> dict[str, Sample]:
    return samples()


@cache
def reference() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(REFERENCE.read_text(encoding="utf-8"))
    return loaded


def kind_of(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


def encode(values: np.ndarray, name: str, importance: np.ndarray | None = None) -> np.ndarray:
    weights = None if importance is None else torch.from_numpy(importance)
    return quantize(torch.from_numpy(values), BLOCK_TYPES[name], importance=weights).numpy()


def decode(data: np.ndarray, name: str) -> np.ndarray:
    """With gguf's decoder, not ours."""
    return gguf.quants.dequantize(data, kind_of(name))


def heavy_tailed(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.standard_t(4, (rows, columns)).astype(np.float32)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("sample", SAMPLES)
def test_error_is_no_more_than_that_of_ggml(sample: str, name: str) -> None:
    values = all_samples()[sample].values
    limit = WORST_RATIO * reference()["errors"][sample][name][0]
    assert weighted_error(values, decode(encode(values, name), name), None) <= limit


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("sample", SAMPLES)
def test_error_with_importance_is_no_more_than_that_of_ggml(sample: str, name: str) -> None:
    values, importance = all_samples()[sample].values, all_samples()[sample].importance
    limit = WORST_RATIO * reference()["errors"][sample][name][1]
    found = decode(encode(values, name, importance), name)
    assert weighted_error(values, found, importance) <= limit


def test_every_sample_has_a_reference() -> None:
    assert set(SAMPLES) == set(all_samples()) == set(reference()["errors"])


@pytest.mark.parametrize("name", ["Q8_0", "MXFP4"])
def test_bytes_are_those_of_ggml(name: str) -> None:
    expected = bytes.fromhex(reference()["student-t4 blocks"][name])
    assert encode(all_samples()["student-t4"].values[:1, :512], name).tobytes() == expected


@pytest.mark.parametrize("name", K_TYPES)
def test_reference_blocks_are_of_the_same_tensor(name: str) -> None:
    """The stored blocks of ggml are as far from the values as ours, within a factor of two."""
    values = all_samples()["student-t4"].values[:1, :512]
    stored = np.frombuffer(bytes.fromhex(reference()["student-t4 blocks"][name]), np.uint8)
    theirs = weighted_error(values, decode(stored[None], name), None)
    ours = weighted_error(values, decode(encode(values, name), name), None)
    assert 0.5 * theirs < ours <= theirs


@pytest.mark.parametrize("name", ["Q8_0", "MXFP4", "BF16"])
def test_bytes_are_those_of_the_gguf_package(name: str) -> None:
    values = heavy_tailed(37, 256)
    values[3] = 0
    values[4, 32:64] = 0
    values[5] *= 1e-4
    values[6] *= 1e4
    expected = gguf.quants.quantize(values, kind_of(name))
    np.testing.assert_array_equal(encode(values, name), expected.view(np.uint8))


@pytest.mark.parametrize(("sign", "code"), [(1, 0), (-1, 0)], ids=["positive", "negative"])
def test_mxfp4_tie_takes_the_smaller_magnitude(sign: int, code: int) -> None:
    values = np.full((1, 32), sign * 0.25, dtype=np.float32)  # between 0 and 0.5
    values[0, 31] = 4.0
    assert encode(values, "MXFP4")[0, 1] & 15 == code


@pytest.mark.parametrize("power", [-140, -127, -125, -20, 0, 20, 120, 127])
def test_mxfp4_exponent_follows_powers_of_two(power: int) -> None:
    values = np.ldexp(np.full((1, 32), 1.0, np.float32), power)
    assert encode(values, "MXFP4")[0, 0] == max(0, power - 2 + 127)


def test_mxfp4_keeps_decoded_mxfp4_values() -> None:
    generator = np.random.default_rng(3)
    blocks = generator.integers(0, 256, (64, 17), dtype=np.uint8)
    blocks[:, 0] = generator.integers(3, 253, 64)
    values = decode(blocks, "MXFP4").reshape(64, 32)
    np.testing.assert_array_equal(decode(encode(values, "MXFP4"), "MXFP4"), values)


@pytest.mark.parametrize("name", sorted(ENCODABLE_TYPES - {"F32", "F16"}))
def test_our_decoder_agrees_with_gguf_on_what_is_written(name: str) -> None:
    data = encode(heavy_tailed(3, 512), name)
    block_type = BLOCK_TYPES[name]
    blocks = torch.from_numpy(data).view(-1, block_type.block_bytes)
    np.testing.assert_array_equal(
        decode_blocks(blocks, block_type).numpy().reshape(3, 512), decode(data, name)
    )


@pytest.mark.parametrize("name", ["F32", "F16"])
def test_floats_are_written_as_they_are(name: str) -> None:
    values = heavy_tailed(3, 5).astype(np.float16).astype(np.float32)
    expected = values.astype(np.float32 if name == "F32" else np.float16)
    assert encode(values, name).tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", TYPES)
def test_zeros_stay_zero(name: str) -> None:
    values = np.zeros((2, 256), dtype=np.float32)
    np.testing.assert_array_equal(decode(encode(values, name), name), values)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e-9, 1e4, 6.5e4])
def test_extreme_magnitudes_give_finite_blocks(name: str, size: float) -> None:
    values = heavy_tailed(1, 512)
    values = (values / np.abs(values).max() * size).astype(np.float32)
    assert np.abs(decode(encode(values, name), name)).max() <= 2 * size + 1e-6


@pytest.mark.parametrize("name", K_TYPES)
@pytest.mark.parametrize("value", [0.37, -0.37, 1e-3])
def test_constant_rows_are_met_closely(name: str, value: float) -> None:
    values = np.full((1, 256), value, dtype=np.float32)
    np.testing.assert_allclose(decode(encode(values, name), name), values, rtol=4e-3)


@pytest.mark.parametrize("name", K_TYPES)
def test_one_value_among_zeros_is_met_closely(name: str) -> None:
    values = np.zeros((1, 256), dtype=np.float32)
    values[0, 77] = -3.0
    np.testing.assert_allclose(decode(encode(values, name), name), values, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", [*K_TYPES, "MXFP4"])
def test_importance_moves_the_error_to_other_columns(name: str) -> None:
    values = heavy_tailed(32, 256)
    importance = np.where(np.arange(256) % 4 == 0, 100.0, 1.0).astype(np.float32)
    plain = decode(encode(values, name), name)
    weighted = decode(encode(values, name, importance), name)
    chosen = importance > 1
    assert (
        np.square(weighted - values)[:, chosen].sum() < np.square(plain - values)[:, chosen].sum()
    )


@pytest.mark.parametrize("name", K_TYPES)
def test_only_ratios_of_importance_matter(name: str) -> None:
    values = heavy_tailed(4, 256)
    importance = np.random.default_rng(1).uniform(0.5, 2, 256).astype(np.float32)
    np.testing.assert_array_equal(
        encode(values, name, importance), encode(values, name, importance * np.float32(2**40))
    )


@pytest.mark.parametrize("name", K_TYPES)
@pytest.mark.parametrize("zeros", [slice(0, 64), slice(0, 256)], ids=["some", "all"])
def test_columns_without_importance_are_allowed(name: str, zeros: slice) -> None:
    values = heavy_tailed(2, 256)
    importance = np.ones(256, dtype=np.float32)
    importance[zeros] = 0
    decoded = decode(encode(values, name, importance), name)
    assert np.isfinite(decoded).all()
    assert np.square(decoded - values).mean() < 0.3 * np.square(values).mean()


@pytest.mark.parametrize("name", K_TYPES)
def test_tiles_do_not_change_the_bytes(name: str) -> None:
    values = heavy_tailed(300, 256)  # more than one tile
    one_by_one = np.concatenate([encode(values[i : i + 1], name) for i in (0, 150, 299)])
    np.testing.assert_array_equal(encode(values, name)[[0, 150, 299]], one_by_one)


def test_float64_values_are_taken() -> None:
    values = torch.from_numpy(heavy_tailed(2, 64)).double()
    expected = quantize(values.float(), BLOCK_TYPES["Q8_0"])
    assert torch.equal(quantize(values, BLOCK_TYPES["Q8_0"]), expected)


def test_values_are_not_changed() -> None:
    values = torch.from_numpy(heavy_tailed(2, 256))
    before = values.clone()
    for name in sorted(ENCODABLE_TYPES):
        quantize(values, BLOCK_TYPES[name], importance=torch.ones(256))
    assert torch.equal(values, before)


@pytest.mark.parametrize("name", TYPES)
def test_no_rows_give_no_bytes(name: str) -> None:
    assert encode(np.zeros((0, 256), dtype=np.float32), name).shape[0] == 0


@pytest.mark.parametrize("name", sorted(ENCODABLE_TYPES))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_no_numbers_are_refused(name: str, bad: float) -> None:
    values = torch.ones(1, 256)
    values[0, 200] = bad
    with pytest.raises(NumericError, match=f"stored as {name} must be finite"):
        quantize(values, BLOCK_TYPES[name])


@pytest.mark.parametrize(("name", "bad"), [("F16", 65505.0), ("Q4_K", -1e5), ("BF16", 3.4e38)])
def test_values_beyond_the_type_are_refused(name: str, bad: float) -> None:
    with pytest.raises(NumericError, match="at most"):
        quantize(torch.full((1, 256), bad), BLOCK_TYPES[name])


def test_type_without_encoder_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be written as IQ2_XXS"):
        quantize(torch.ones(1, 256), BLOCK_TYPES["IQ2_XXS"])


def test_rows_of_part_of_a_block_are_refused() -> None:
    with pytest.raises(ShapeError, match="multiple of 256 columns, found 128"):
        quantize(torch.ones(2, 128), BLOCK_TYPES["Q4_K"])


def test_integers_are_refused() -> None:
    with pytest.raises(ShapeError, match="float"):
        quantize(torch.ones(2, 256, dtype=torch.int64), BLOCK_TYPES["Q4_K"])


def test_blocks_of_another_width_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"float32 \[n, 32\]"):
        encode_blocks(torch.ones(2, 64), BLOCK_TYPES["Q8_0"])


def test_importance_of_another_width_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"importance must be float \[256\]"):
        quantize(torch.ones(2, 256), BLOCK_TYPES["Q4_K"], importance=torch.ones(32))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_importance_that_is_no_weight_is_refused(bad: float) -> None:
    importance = torch.ones(256)
    importance[9] = bad
    with pytest.raises(NumericError, match="importance"):
        quantize(torch.ones(2, 256), BLOCK_TYPES["Q4_K"], importance=importance)
