"""Changing storage types: each class of matrices gets its type, and the encoder's own bytes."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_files
import torch
from tiny_model import random_tensors, tiny_config

from edgedsv4.errors import ConfigError, ShapeError
from edgedsv4.formats.gguf import read_gguf
from edgedsv4.kernels.quantize import quantize
from edgedsv4.runtime.convert import QuantizeOptions, quantize_model
from edgedsv4.runtime.shipped_models import RANDOM_TINY


def types_of(path: Path) -> dict[str, str]:
    with read_gguf(path) as file:
        return {name: record.block_type.name for name, record in file.tensors.items()}


def wide_model(directory: Path) -> Path:
    """A GGUF file whose expert and attention rows are whole K blocks."""
    config = tiny_config(
        hidden_size=256, expert_width=256, q_lora_rank=256, num_draft_layers=1, num_experts=3
    )
    path = directory / "wide.gguf"
    tiny_files.write_gguf(path, config, random_tensors(config, 9), types="f32", tokenizer=True)
    return path


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_model(tmp_path_factory.mktemp("wide"))


@pytest.mark.parametrize("experts", ["Q2_K", "Q4_K", "Q6_K", "Q8_0", "MXFP4", "F16", "BF16"])
def test_experts_get_their_type(wide: Path, tmp_path: Path, experts: str) -> None:
    report = quantize_model(wide, tmp_path / "m.gguf", QuantizeOptions(experts=experts))
    assert report.notes == ()
    types = types_of(tmp_path / "m.gguf")
    assert {kind for name, kind in types.items() if "_exps." in name} == {experts}
    assert {kind for name, kind in types.items() if "_exps." not in name} == {"F32", "I32"}


def test_written_blocks_are_those_of_the_encoder(wide: Path, tmp_path: Path) -> None:
    quantize_model(wide, tmp_path / "m.gguf", QuantizeOptions(experts="Q4_K", dense="Q6_K"))
    with read_gguf(wide) as before, read_gguf(tmp_path / "m.gguf") as after:
        for name in ("blk.2.ffn_up_exps.weight", "blk.1.attn_q_b.weight"):
            source, found = before.tensors[name], after.tensors[name]
            values = torch.from_numpy(source.data().view("<f4").copy()).view(-1, source.shape[-1])
            assert quantize(values, found.block_type).numpy().tobytes() == found.data().tobytes()


def test_each_class_has_its_own_type(wide: Path, tmp_path: Path) -> None:
    options = QuantizeOptions(experts="Q2_K", dense="Q8_0", head="Q6_K", embed="Q4_K")
    quantize_model(wide, tmp_path / "m.gguf", options)
    types = types_of(tmp_path / "m.gguf")
    assert types["output.weight"] == "Q6_K"
    assert types["token_embd.weight"] == "Q4_K"
    assert types["mtp.0.h_proj.weight"] == "Q8_0"
    dense = ("attn_q_a", "attn_kv", "attn_output_b", "indexer.attn_q_b", "ffn_down_shexp")
    assert {types[f"blk.1.{name}.weight"] for name in dense} == {"Q8_0"}
    kept = ("ffn_gate_inp", "attn_compressor_kv", "indexer_compressor_gate", "indexer.proj")
    assert {types[f"blk.1.{name}.weight"] for name in kept} == {"F32"}
    with read_gguf(tmp_path / "m.gguf") as file:
        assert file.metadata["general.file_type"] == 10


def test_rows_of_part_of_a_block_get_a_smaller_one_and_it_is_told(tmp_path: Path) -> None:
    options = QuantizeOptions(experts="Q4_K")
    report = quantize_model(RANDOM_TINY, tmp_path / "m.gguf", options)
    expected = "stored as Q8_0 instead of Q4_K, because their rows are no multiple of 256"
    assert report.notes == (f"{expected}: 12 tensors",)
    assert types_of(tmp_path / "m.gguf")["blk.0.ffn_up_exps.weight"] == "Q8_0"


def test_nothing_named_keeps_everything(wide: Path, tmp_path: Path) -> None:
    quantize_model(wide, tmp_path / "once.gguf", QuantizeOptions(experts="Q4_K", dense="Q8_0"))
    quantize_model(tmp_path / "once.gguf", tmp_path / "twice.gguf", QuantizeOptions())
    assert (tmp_path / "once.gguf").read_bytes() == (tmp_path / "twice.gguf").read_bytes()


def test_source_is_not_overwritten(wide: Path) -> None:
    before = wide.read_bytes()
    with pytest.raises(ConfigError, match="is the source itself"):
        quantize_model(wide, wide, QuantizeOptions(head="Q8_0"))
    assert wide.read_bytes() == before


def error_of(path: Path, source: Path, name: str, columns: slice) -> float:
    with read_gguf(source) as before, read_gguf(path) as after:
        values = before.tensors[name].data().view("<f4").reshape(before.tensors[name].shape)
        found = after.tensors[name]
        kind = gguf.GGMLQuantizationType(found.block_type.ggml_id)
        rows = found.data().reshape(*found.shape[:-1], -1)
        difference = gguf.quants.dequantize(rows, kind) - values
    return float(np.square(difference[..., columns]).mean())


@pytest.mark.parametrize("per_expert", [False, True])
def test_importance_reaches_its_tensor(wide: Path, tmp_path: Path, per_expert: bool) -> None:
    name = "blk.1.ffn_up_exps.weight"
    weights = torch.ones(256)
    weights[::8] = 1000
    importance = {name: weights.expand(3, 256) if per_expert else weights}
    options = QuantizeOptions(experts="Q2_K")
    quantize_model(wide, tmp_path / "plain.gguf", options)
    quantize_model(wide, tmp_path / "weighted.gguf", options, importance=importance)
    chosen = slice(0, None, 8)
    plain = error_of(tmp_path / "plain.gguf", wide, name, chosen)
    assert error_of(tmp_path / "weighted.gguf", wide, name, chosen) < 0.7 * plain
    other = "blk.1.ffn_gate_exps.weight"
    assert error_of(tmp_path / "weighted.gguf", wide, other, chosen) == error_of(
        tmp_path / "plain.gguf", wide, other, chosen
    )


def test_importance_of_another_width_is_refused(wide: Path, tmp_path: Path) -> None:
    importance = {"output.weight": torch.ones(255)}
    with pytest.raises(ShapeError, match=r"output\.weight must be \[256\], found \[255\]"):
        quantize_model(
            wide, tmp_path / "m.gguf", QuantizeOptions(head="Q4_K"), importance=importance
        )
