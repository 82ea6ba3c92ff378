"""Weights as the forward gets them: the right values out of every way to store them."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from changed_files import GgufTensors, change_gguf, change_official, f32
from tiny_model import Tensors, random_tensors, tiny_config, write_gguf, write_official

from edgedsv4.errors import FormatError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.formats.checkpoint import attach_draft, open_checkpoint
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize
from edgedsv4.model.weight_table import bind_weights
from edgedsv4.model.weights import ModelWeights, RoutedExperts, load_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# Layer 0 routes by table and has no compressor, 1 is indexed, 2 pools 128 tokens.
CONFIG = tiny_config(
    compress_ratios=(0, 4, 128), num_hash_layers=1, num_draft_layers=1, hidden_size=128
)
Stored = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return random_tensors(CONFIG, seed=23)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tensors: Tensors) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_gguf(directory / "f32.gguf", CONFIG, tensors)
    write_official(directory / "plain", CONFIG, tensors)
    return directory


def load(path: Path) -> tuple[ModelWeights, RoutedExperts]:
    """Weights of a checkpoint that stays open as long as they are used."""
    return load_weights(open_checkpoint(path))


def same(weight: QuantMatrix | torch.Tensor | None, array: np.ndarray) -> bool:
    assert weight is not None
    values = dequantize(weight) if isinstance(weight, QuantMatrix) else weight
    return values.dtype == torch.float32 and bool(
        torch.equal(values, torch.from_numpy(array).float())
    )


def check_layer_one(weights: ModelWeights, tensors: Tensors) -> None:
    """Compare every weight of an indexed layer with the arrays it came from."""
    layer = weights.layers[1]
    attention, moe = layer.attention, layer.moe
    compressor, indexer = attention.compressor, attention.indexer
    assert compressor is not None
    assert indexer is not None
    pairs = {
        "attn_norm.weight": layer.attn_norm,
        "ffn_norm.weight": layer.ffn_norm,
        "hc_attn_fn": layer.hc_attn.fn,
        "hc_attn_base": layer.hc_attn.base,
        "hc_attn_scale": layer.hc_attn.scale,
        "hc_ffn_fn": layer.hc_ffn.fn,
        "hc_ffn_base": layer.hc_ffn.base,
        "hc_ffn_scale": layer.hc_ffn.scale,
        "attn.wq_a.weight": attention.wq_a,
        "attn.q_norm.weight": attention.q_norm,
        "attn.wq_b.weight": attention.wq_b,
        "attn.wkv.weight": attention.wkv,
        "attn.kv_norm.weight": attention.kv_norm,
        "attn.attn_sink": attention.sink,
        "attn.wo_a.weight": attention.wo_a,
        "attn.wo_b.weight": attention.wo_b,
        "attn.compressor.wkv.weight": compressor.wkv,
        "attn.compressor.wgate.weight": compressor.wgate,
        "attn.compressor.ape": compressor.ape,
        "attn.compressor.norm.weight": compressor.norm,
        "attn.indexer.wq_b.weight": indexer.wq_b,
        "attn.indexer.weights_proj.weight": indexer.weights_proj,
        "attn.indexer.compressor.wkv.weight": indexer.compressor.wkv,
        "attn.indexer.compressor.wgate.weight": indexer.compressor.wgate,
        "attn.indexer.compressor.ape": indexer.compressor.ape,
        "attn.indexer.compressor.norm.weight": indexer.compressor.norm,
        "ffn.gate.weight": moe.router,
        "ffn.gate.bias": moe.bias,
        "ffn.shared_experts.w1.weight": moe.shared_w1,
        "ffn.shared_experts.w2.weight": moe.shared_w2,
        "ffn.shared_experts.w3.weight": moe.shared_w3,
    }
    assert [
        name for name, value in pairs.items() if not same(value, tensors[f"layers.1.{name}"])
    ] == []


def check_experts(experts: RoutedExperts, tensors: Tensors) -> None:
    """Compare every routed expert, those of the MTP block included."""
    for layer, block in enumerate(["layers.0", "layers.1", "layers.2", "mtp.0"]):
        for expert_id in range(CONFIG.num_experts):
            expert = experts.expert(layer, expert_id)
            for part in ("w1", "w3", "w2"):
                name = f"{block}.ffn.experts.{expert_id}.{part}.weight"
                assert same(getattr(expert, part), tensors[name]), name


def check_draft(weights: ModelWeights, tensors: Tensors) -> None:
    """Compare what the MTP block has of its own, and one weight of its layer."""
    draft = weights.draft
    assert draft is not None
    assert same(draft.e_proj, tensors["mtp.0.e_proj.weight"])
    assert same(draft.h_proj, tensors["mtp.0.h_proj.weight"])
    assert same(draft.enorm, tensors["mtp.0.enorm.weight"])
    assert same(draft.hnorm, tensors["mtp.0.hnorm.weight"])
    assert same(draft.norm, tensors["mtp.0.norm.weight"])
    assert same(draft.hc_head.fn, tensors["mtp.0.hc_head_fn"])
    assert same(draft.hc_head.base, tensors["mtp.0.hc_head_base"])
    assert same(draft.layer.attention.wo_b, tensors["mtp.0.attn.wo_b.weight"])
    assert draft.layer.moe.expert_table is None


@pytest.mark.parametrize("name", ["f32.gguf", "plain"])
def test_every_weight_has_the_values_of_its_tensor(models: Path, tensors: Tensors, name: str):
    weights, experts = load(models / name)
    check_layer_one(weights, tensors)
    check_experts(experts, tensors)
    check_draft(weights, tensors)
    assert same(weights.embed, tensors["embed.weight"])
    assert same(weights.norm, tensors["norm.weight"])
    assert same(weights.head, tensors["head.weight"])
    assert same(weights.hc_head.scale, tensors["hc_head_scale"])


@pytest.mark.parametrize("name", ["f32.gguf", "plain"])
def test_expert_tables_are_int64(models: Path, tensors: Tensors, name: str):
    weights, _ = load(models / name)
    table = weights.layers[0].moe.expert_table
    assert table is not None
    assert table.dtype == torch.int64
    assert np.array_equal(table.numpy(), tensors["layers.0.ffn.gate.tid2eid"])
    assert weights.layers[0].moe.bias is None


def fuse(tensors: Stored) -> None:
    """Join every pair that a checkpoint may hold as one matrix."""

    def join(target: str, *sources: str) -> None:
        for suffix in (".weight", ".scale"):
            if all(f"{source}{suffix}" in tensors for source in sources):
                parts = [tensors.pop(f"{source}{suffix}") for source in sources]
                kind = parts[0].dtype
                raw = [part.view(torch.uint8) if suffix == ".scale" else part for part in parts]
                tensors[f"{target}{suffix}"] = torch.cat(raw).view(kind)

    for block in ("layers.0", "layers.1", "layers.2", "mtp.0"):
        join(f"{block}.attn.wqkv_a", f"{block}.attn.wq_a", f"{block}.attn.wkv")
        for part in (f"{block}.attn.compressor", f"{block}.attn.indexer.compressor"):
            join(f"{part}.wkv_gate", f"{part}.wkv", f"{part}.wgate")
        shared = f"{block}.ffn.shared_experts"
        join(f"{shared}.gate_up", f"{shared}.w1", f"{shared}.w3")
        for expert in range(CONFIG.num_experts):
            one = f"{block}.ffn.experts.{expert}"
            join(f"{one}.gate_up", f"{one}.w1", f"{one}.w3")


def test_fused_matrices_are_taken_apart(models: Path, tensors: Tensors, tmp_path: Path):
    weights, experts = load(change_official(models / "plain", tmp_path / "m", fuse))
    check_layer_one(weights, tensors)
    check_experts(experts, tensors)


def test_fused_quantised_matrices_take_their_own_scales(tensors: Tensors, tmp_path: Path):
    values = write_official(tmp_path / "q", CONFIG, tensors, quantised=True)
    weights, experts = load(change_official(tmp_path / "q", tmp_path / "m", fuse))
    check_layer_one(weights, values)
    check_experts(experts, values)


def test_parts_of_a_fused_matrix_share_its_memory(models: Path, tmp_path: Path):
    path = change_official(models / "plain", tmp_path / "m", fuse)
    with open_checkpoint(path) as checkpoint:
        attention = load_weights(checkpoint)[0].layers[1].attention
        record = checkpoint.tensors["layers.1.attn.wqkv_a.weight"]
        start = record.data().ctypes.data
    offset = attention.wkv.data.data_ptr() - attention.wq_a.data.data_ptr()
    assert attention.wq_a.data.data_ptr() == start
    assert offset == CONFIG.q_lora_rank * CONFIG.hidden_size * 4


TRANSFORMERS_NAMES = (
    (".attn.indexer.compressor.", ".self_attn.compressor.indexer."),
    (".attn.indexer.weights_proj.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (".attn.indexer.wq_b.", ".self_attn.compressor.indexer.q_b_proj."),
    (".attn.compressor.", ".self_attn.compressor."),
    (".attn.", ".self_attn."),
    (".compressor.norm.", ".compressor.kv_norm."),
    (".compressor.indexer.norm.", ".compressor.indexer.kv_norm."),
    (".ape", ".position_bias"),
    (".wkv.", ".kv_proj."),
    (".wgate.", ".gate_proj."),
    (".attn_sink", ".sinks"),
    (".wq_a.", ".q_a_proj."),
    (".wq_b.", ".q_b_proj."),
    (".q_norm.", ".q_a_norm."),
    (".wo_a.", ".o_a_proj."),
    (".wo_b.", ".o_b_proj."),
    (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".hc_attn_", ".attn_hc."),
    (".hc_ffn_", ".ffn_hc."),
    (".ffn.gate.bias", ".mlp.gate.e_score_correction_bias"),
    (".ffn.", ".mlp."),
    (".shared_experts.w1.", ".shared_experts.gate_proj."),
    (".shared_experts.w3.", ".shared_experts.up_proj."),
    (".shared_experts.w2.", ".shared_experts.down_proj."),
)


def transformers_names(tensors: Stored) -> None:
    """Rename the main model's tensors and stack its experts as transformers does."""
    for layer in range(CONFIG.num_layers):
        stem = f"layers.{layer}.ffn.experts"
        found = {
            part: [tensors.pop(f"{stem}.{e}.{part}.weight") for e in range(CONFIG.num_experts)]
            for part in ("w1", "w3", "w2")
        }
        joined = [torch.cat(pair) for pair in zip(found["w1"], found["w3"], strict=True)]
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.stack(joined)
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.stack(found["w2"])
    for name in [name for name in tensors if name.startswith("layers.")]:
        renamed = name
        for ours, theirs in TRANSFORMERS_NAMES:
            renamed = renamed.replace(ours, theirs)
        tensors[f"model.{renamed}"] = tensors.pop(name)
    tensors["model.embed_tokens.weight"] = tensors.pop("embed.weight")
    tensors["lm_head.weight"] = tensors.pop("head.weight")
    tensors["model.norm.weight"] = tensors.pop("norm.weight")
    for leaf in ("fn", "base", "scale"):
        tensors[f"model.hc_head.hc_{leaf}"] = tensors.pop(f"hc_head_{leaf}")


def test_transformers_names_and_stacked_experts(models: Path, tensors: Tensors, tmp_path: Path):
    path = change_official(models / "plain", tmp_path / "m", transformers_names)
    bound = bind_weights(open_checkpoint(path))
    assert bound.warnings == ()
    weights, experts = load_weights(bound)
    check_layer_one(weights, tensors)
    check_experts(experts, tensors)


def test_gate_and_up_of_all_experts_in_one_gguf_tensor(
    models: Path, tensors: Tensors, tmp_path: Path
):
    def join(found: GgufTensors) -> None:
        for place in ("blk.0", "blk.1", "blk.2", "mtp.0"):
            parts = [found.pop(f"{place}.ffn_{word}_exps.weight") for word in ("gate", "up")]
            arrays = [data.view(np.float32).reshape(shape) for shape, _, data in parts]
            found[f"{place}.ffn_gate_up_exps.weight"] = f32(np.concatenate(arrays, axis=1))

    _, experts = load(change_gguf(models / "f32.gguf", tmp_path / "m.gguf", join))
    check_experts(experts, tensors)


def test_scale_of_each_expert_is_applied(models: Path, tensors: Tensors, tmp_path: Path):
    factors = np.linspace(0.5, 4, CONFIG.num_experts, dtype=np.float32)

    def scale(found: GgufTensors) -> None:
        found["blk.1.ffn_up_exps.scale"] = f32(factors)
        found["blk.1.ffn_up_exps.input_scale"] = f32(factors)

    path = change_gguf(models / "f32.gguf", tmp_path / "m.gguf", scale)
    bound = bind_weights(open_checkpoint(path))
    assert bound.warnings == ()
    _, experts = load_weights(bound)
    for expert_id, factor in enumerate(factors):
        array = tensors[f"layers.1.ffn.experts.{expert_id}.w3.weight"]
        assert same(experts.expert(1, expert_id).w3, array * factor)


def test_scale_of_one_matrix_is_applied(models: Path, tensors: Tensors, tmp_path: Path):
    def scale(found: GgufTensors) -> None:
        found["blk.0.attn_q_a.scale"] = f32(np.array([0.25]))

    weights, _ = load(change_gguf(models / "f32.gguf", tmp_path / "m.gguf", scale))
    assert same(weights.layers[0].attention.wq_a, tensors["layers.0.attn.wq_a.weight"] * 0.25)


def test_a_scale_that_is_no_number_is_refused(models: Path, tmp_path: Path):
    def scale(found: GgufTensors) -> None:
        found["blk.0.attn_q_a.scale"] = f32(np.array([np.nan]))

    with pytest.raises(FormatError, match=r"blk\.0\.attn_q_a\.scale holds nan"):
        load(change_gguf(models / "f32.gguf", tmp_path / "m.gguf", scale))


def official_draft_names(found: GgufTensors) -> None:
    """The block under its official names inside a GGUF file; experts stay stacked."""
    renames = {
        "attn_q_a": "attn.wq_a",
        "attn_output_b": "attn.wo_b",
        "ffn_gate_inp": "ffn.gate",
        "attn_sinks": "attn.attn_sink",
    }
    for ours, theirs in renames.items():
        found[f"mtp.0.{theirs}.weight"] = found.pop(f"mtp.0.{ours}.weight")


def joined_draft(found: GgufTensors) -> None:
    """The block as llama.cpp writes it, with its head mix where `attach_draft` puts it."""
    (shape, kind, e_proj), (_, _, h_proj) = (
        found.pop("mtp.0.e_proj.weight"),
        found.pop("mtp.0.h_proj.weight"),
    )
    rows, columns = shape
    halves = [part.reshape(rows, -1) for part in (e_proj, h_proj)]
    joined = np.ascontiguousarray(np.concatenate(halves, axis=1))
    found["blk.3.nextn.eh_proj.weight"] = ((rows, 2 * columns), kind, joined)
    for name in ("enorm", "hnorm"):
        found[f"blk.3.nextn.{name}.weight"] = found.pop(f"mtp.0.{name}.weight")
    found["blk.3.nextn.shared_head_norm.weight"] = found.pop("mtp.0.norm.weight")
    for name in [name for name in found if name.startswith("mtp.0.")]:
        target = name.replace("mtp.0.hc_head", "output_hc").replace("mtp.0.", "blk.3.")
        found[target] = found.pop(name)


def only_draft(edit: Callable[[GgufTensors], None] | None = None) -> Callable[[GgufTensors], None]:
    def keep(found: GgufTensors) -> None:
        kept = {name: tensor for name, tensor in found.items() if name.startswith("mtp.")}
        found.clear()
        found.update(kept)
        if edit is not None:
            edit(found)

    return keep


def without_draft(found: GgufTensors) -> None:
    for name in [name for name in found if name.startswith("mtp.")]:
        del found[name]


@pytest.mark.parametrize("edit", [None, official_draft_names, joined_draft])
def test_mtp_block_of_a_sidecar_in_every_spelling(
    models: Path,
    tensors: Tensors,
    tmp_path: Path,
    edit: Callable[[GgufTensors], None] | None,
):
    source = models / "f32.gguf"
    main = change_gguf(source, tmp_path / "main.gguf", without_draft)
    sidecar = change_gguf(source, tmp_path / "mtp.gguf", only_draft(edit))
    bound = bind_weights(attach_draft(open_checkpoint(main), sidecar))
    assert bound.warnings == ()
    weights, experts = load_weights(bound)
    check_draft(weights, tensors)
    check_experts(experts, tensors)
    assert same(weights.hc_head.base, tensors["hc_head_base"])


def test_joined_projection_that_splits_inside_a_block(models: Path, tmp_path: Path):
    def edit(found: GgufTensors) -> None:
        joined_draft(found)
        kind = BLOCK_TYPES["Q4_K"]
        data = np.zeros(128 * kind.row_bytes(256), dtype=np.uint8)
        found["blk.3.nextn.eh_proj.weight"] = ((128, 256), kind, data)

    main = change_gguf(models / "f32.gguf", tmp_path / "main.gguf", without_draft)
    sidecar = change_gguf(models / "f32.gguf", tmp_path / "mtp.gguf", only_draft(edit))
    both = attach_draft(open_checkpoint(main), sidecar)
    with pytest.raises(FormatError, match="cannot be split: 128 columns") as caught:
        bind_weights(both)
    assert len(caught.value.problems) == 1


def test_without_mtp_block_there_is_no_draft(models: Path, tmp_path: Path):
    weights, experts = load(change_gguf(models / "f32.gguf", tmp_path / "m.gguf", without_draft))
    assert weights.draft is None
    assert experts.num_layers == CONFIG.num_layers


def test_matrices_are_views_of_the_file(models: Path):
    with open_checkpoint(models / "f32.gguf") as checkpoint:
        weights, experts = load_weights(checkpoint)
        for name, weight in (
            ("output.weight", weights.head),
            ("blk.2.attn_output_a.weight", weights.layers[2].attention.wo_a),
        ):
            assert weight.data.data_ptr() == checkpoint.tensors[name].data().ctypes.data
        stack = checkpoint.tensors["blk.2.ffn_down_exps.weight"]
        size = stack.nbytes // CONFIG.num_experts
        start = stack.data().ctypes.data
        assert experts.expert(2, 5).w2.data.data_ptr() == start + 5 * size


def test_small_parameters_do_not_point_into_the_file(models: Path):
    with open_checkpoint(models / "f32.gguf") as checkpoint:
        weights, _ = load_weights(checkpoint)
        start = checkpoint.tensors["output_norm.weight"].data().ctypes.data
    assert weights.norm.data_ptr() != start


def test_weights_outlive_the_checkpoint(models: Path, tensors: Tensors):
    with open_checkpoint(models / "f32.gguf") as checkpoint:
        weights, _ = load_weights(checkpoint)
    assert same(weights.embed, tensors["embed.weight"])


def test_wo_a_is_one_matrix_with_the_groups_one_after_the_other(models: Path, tensors: Tensors):
    weights, _ = load(models / "f32.gguf")
    wo_a = weights.layers[0].attention.wo_a
    assert (wo_a.rows, wo_a.columns) == (2 * 32, CONFIG.group_width)
    second = dequantize(wo_a, rows=slice(32, 64))
    assert np.array_equal(second.numpy(), tensors["layers.0.attn.wo_a.weight"][32:])


def test_fetch_returns_experts_in_the_order_asked_for(models: Path, tensors: Tensors):
    _, experts = load(models / "f32.gguf")
    for expert_id, expert in zip((5, 0, 5), experts.fetch(1, (5, 0, 5)), strict=True):
        assert same(expert.w1, tensors[f"layers.1.ffn.experts.{expert_id}.w1.weight"])


def test_fetch_notices_that_the_file_changed(models: Path, tmp_path: Path):
    copy = tmp_path / "m.gguf"
    shutil.copy(models / "f32.gguf", copy)
    _, experts = load(copy)
    experts.fetch(0, (1,))
    os.truncate(copy, copy.stat().st_size - 1)
    with pytest.raises(FormatError, match="changed while open"):
        experts.fetch(0, (1,))


@pytest.mark.parametrize(("layer", "expert_id"), [(0, 8), (0, -1), (4, 0)])
def test_an_expert_that_does_not_exist(models: Path, layer: int, expert_id: int):
    _, experts = load(models / "f32.gguf")
    with pytest.raises(IndexError):
        experts.expert(layer, expert_id)
