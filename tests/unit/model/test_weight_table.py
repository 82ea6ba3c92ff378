"""Finding and checking weights: every dialect, every fault, and one error for all of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from changed_files import GgufTensors, change_gguf, change_official, f32
from tiny_model import random_tensors, tiny_config, write_gguf, write_official

from edgedsv4.errors import FormatError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.model.weight_table import bind_weights, weight_report

if TYPE_CHECKING:
    from edgedsv4.model.bound_weights import BoundWeights

CONFIG = tiny_config(compress_ratios=(0, 4, 128), num_hash_layers=1, num_draft_layers=1)
Stored = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, with an MTP block, as an F32 GGUF file and as a quantised directory."""
    directory = tmp_path_factory.mktemp("models")
    tensors = random_tensors(CONFIG, seed=11)
    write_gguf(directory / "f32.gguf", CONFIG, tensors)
    write_gguf(directory / "mixed.gguf", CONFIG, tensors, types="a")
    write_official(directory / "official", CONFIG, tensors, quantised=True)
    write_official(directory / "plain", CONFIG, tensors)
    return directory


def bind(path: Path) -> BoundWeights:
    with open_checkpoint(path) as checkpoint:
        return bind_weights(checkpoint)


def faults_of(path: Path) -> tuple[str, ...]:
    with open_checkpoint(path) as checkpoint, pytest.raises(FormatError) as caught:
        bind_weights(checkpoint)
    assert caught.value.path == path
    return caught.value.problems


def gguf_fault(models: Path, tmp_path: Path, edit: Callable[[GgufTensors], None]) -> str:
    """The single fault of an edited GGUF file."""
    (fault,) = faults_of(change_gguf(models / "f32.gguf", tmp_path / "m.gguf", edit))
    return fault


def official_fault(models: Path, tmp_path: Path, edit: Callable[[Stored], None]) -> str:
    """The single fault of an edited official directory."""
    (fault,) = faults_of(change_official(models / "official", tmp_path / "m", edit))
    return fault


def test_both_dialects_bind_the_same_roles(models: Path):
    assert list(bind(models / "f32.gguf").tensors) == list(bind(models / "official").tensors)


def test_every_tensor_of_a_sound_file_is_used(models: Path):
    for name in ("f32.gguf", "mixed.gguf", "official", "plain"):
        assert bind(models / name).warnings == ()


def test_layers_have_the_weights_of_their_kind(models: Path):
    roles = bind(models / "f32.gguf").tensors
    assert "layers.0.attn.compressor.wkv" not in roles
    assert "layers.1.attn.indexer.compressor.ape" in roles
    assert "layers.2.attn.compressor.wkv" in roles
    assert "layers.2.attn.indexer.wq_b" not in roles
    assert roles["layers.1.attn.compressor.ape"].shape == (4, 128)
    assert roles["layers.2.attn.compressor.ape"].shape == (128, 64)


def test_hash_layers_have_a_table_instead_of_a_bias(models: Path):
    roles = bind(models / "f32.gguf").tensors
    assert "layers.0.ffn.gate.tid2eid" in roles
    assert "layers.0.ffn.gate.bias" not in roles
    assert "layers.1.ffn.gate.bias" in roles
    assert "draft.ffn.gate.bias" in roles


def test_report_covers_every_byte_of_the_tensors(models: Path):
    for name in ("f32.gguf", "mixed.gguf", "official"):
        with open_checkpoint(models / name) as checkpoint:
            stored = sum(record.nbytes for record in checkpoint.tensors.values())
            assert sum(line.nbytes for line in weight_report(checkpoint)) == stored


def test_report_sums_up_the_experts_of_a_layer(models: Path):
    with open_checkpoint(models / "official") as checkpoint:
        lines = {line.role: line for line in weight_report(checkpoint)}
    line = lines["layers.2.ffn.experts.w2"]
    assert line.name == "layers.2.ffn.experts.*.w2.weight"
    assert line.block_type == "FP4_E2M1"
    assert line.nbytes == 8 * 96 * (64 // 2 + 64 // 32)


def test_report_works_without_torch(models: Path):
    code = (
        "import sys; from pathlib import Path;"
        "from edgedsv4.formats.checkpoint import open_checkpoint;"
        "from edgedsv4.model.weight_table import weight_report;"
        "weight_report(open_checkpoint(Path(sys.argv[1])));"
        "sys.exit('torch' in sys.modules)"
    )
    for name in ("mixed.gguf", "official"):
        command = [sys.executable, "-c", code, str(models / name)]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[3])


def test_unknown_tensors_are_one_warning(models: Path, tmp_path: Path):
    def add(tensors: GgufTensors) -> None:
        for index in range(5):
            tensors[f"blk.0.extra_{index}.weight"] = f32(np.zeros(4))

    bound = bind(change_gguf(models / "f32.gguf", tmp_path / "m.gguf", add))
    assert len(bound.warnings) == 1
    assert bound.warnings[0].startswith("5 tensors are not used: blk.0.extra_0.weight, ")
    assert bound.warnings[0].endswith(" and 2 more")


def test_embedding_and_head_of_an_mtp_block_are_tolerated(models: Path, tmp_path: Path):
    def add(tensors: Stored) -> None:
        tensors["mtp.0.emb.tok_emb.weight"] = torch.zeros(2, 2)
        tensors["mtp.0.head.weight"] = torch.zeros(2, 2)

    assert bind(change_official(models / "official", tmp_path / "m", add)).warnings == ()


def test_early_names_without_suffix_are_found(models: Path, tmp_path: Path):
    bare = ("attn_sinks", "hc_attn_", "hc_ffn_", "_ape", "tid2eid", "output_hc_")

    def strip(tensors: GgufTensors) -> None:
        for name in list(tensors):
            if name.startswith(("blk.", "output_hc_")) and any(part in name for part in bare):
                tensors[name.removesuffix(".weight")] = tensors.pop(name)

    bound = bind(change_gguf(models / "f32.gguf", tmp_path / "m.gguf", strip))
    assert bound.tensors["layers.1.attn.compressor.ape"].record.name == "blk.1.attn_compressor_ape"
    assert bound.warnings == ()


def test_f16_parameters_are_accepted(models: Path, tmp_path: Path):
    def halve(tensors: GgufTensors) -> None:
        for name, (shape, kind, data) in tensors.items():
            if kind.name == "F32" and "_exps" not in name:
                half = data.view(np.float32).astype(np.float16)
                tensors[name] = (shape, BLOCK_TYPES["F16"], half)

    bound = bind(change_gguf(models / "f32.gguf", tmp_path / "m.gguf", halve))
    assert bound.tensors["layers.0.hc_attn_fn"].block_type.name == "F16"


def test_quantised_mixing_matrices_are_accepted(models: Path, tmp_path: Path):
    def quantise(tensors: GgufTensors) -> None:
        shape, _, _ = tensors["blk.0.hc_attn_fn.weight"]
        kind = BLOCK_TYPES["Q8_0"]
        data = np.zeros(shape[0] * kind.row_bytes(shape[1]), dtype=np.uint8)
        tensors["blk.0.hc_attn_fn.weight"] = (shape, kind, data)

    bound = bind(change_gguf(models / "f32.gguf", tmp_path / "m.gguf", quantise))
    assert bound.tensors["layers.0.hc_attn_fn"].block_type.name == "Q8_0"


def test_quark_names_of_scales_are_found(models: Path, tmp_path: Path):
    def rename(tensors: Stored) -> None:
        for name in [name for name in tensors if name.endswith(".scale")]:
            tensors[name.replace(".scale", ".weight_scale")] = tensors.pop(name)

    bound = bind(change_official(models / "official", tmp_path / "m", rename))
    assert bound.tensors["layers.0.attn.wq_a"].scale is not None
    assert bound.warnings == ()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_packed_fp4_may_be_signed_or_unsigned_bytes(
    models: Path, tmp_path: Path, dtype: torch.dtype
):
    def change(tensors: Stored) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype == torch.int8:
                tensors[name] = tensor.view(dtype)

    bound = bind(change_official(models / "official", tmp_path / "m", change))
    assert bound.experts[1].w1[0].block_type.name == "FP4_E2M1"
    assert bound.experts[1].w1[0].shape == (64, 96)


def test_experts_may_be_fp8(models: Path, tmp_path: Path):
    def change(tensors: Stored) -> None:
        for name in [n for n in tensors if ".experts." in n and n.endswith(".weight")]:
            rows, columns = tensors[name].shape[0], 2 * tensors[name].shape[1]
            tensors[name] = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
            scale = torch.zeros(1, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu)
            tensors[name.replace(".weight", ".scale")] = scale

    bound = bind(change_official(models / "official", tmp_path / "m", change))
    assert bound.experts[0].w2[7].block_type.name == "FP8_E4M3"


def test_fp8_blocks_of_32_are_accepted(models: Path, tmp_path: Path):
    def change(tensors: Stored) -> None:
        scale = torch.zeros(2, 3, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        tensors["layers.0.attn.wq_a.scale"] = scale

    bound = bind(change_official(models / "official", tmp_path / "m", change))
    scale = bound.tensors["layers.0.attn.wq_a"].scale
    assert scale is not None
    assert scale.rows == 2


def test_missing_tensor_is_named_with_its_shape(models: Path, tmp_path: Path):
    fault = gguf_fault(models, tmp_path, lambda t: t.pop("blk.1.attn_q_a.weight"))
    assert fault == (
        "tensor blk.1.attn_q_a.weight is missing, expected [96, 64] (hidden_size, q_lora_rank)"
    )


def test_wrong_shape_is_shown_in_the_order_of_the_file(models: Path, tmp_path: Path):
    def widen(tensors: GgufTensors) -> None:
        tensors["blk.1.attn_q_a.weight"] = f32(np.zeros((48, 112)))

    assert gguf_fault(models, tmp_path, widen) == (
        "tensor blk.1.attn_q_a.weight is [112, 48], expected [96, 64] (hidden_size, q_lora_rank)"
    )


def test_wrong_official_shape_is_row_major(models: Path, tmp_path: Path):
    def widen(tensors: Stored) -> None:
        tensors["layers.1.attn_norm.weight"] = torch.zeros(97, dtype=torch.bfloat16)

    assert official_fault(models, tmp_path, widen) == (
        "tensor layers.1.attn_norm.weight is [97], expected [96] (hidden_size)"
    )


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("blk.0.attn_q_a.weight", "I32", "a weight type"),
        ("blk.0.attn_q_a.weight", "I8", "a weight type"),
        ("blk.0.attn_norm.weight", "Q8_0", "F32, F16 or BF16"),
        ("blk.0.attn_norm.weight", "I32", "F32, F16 or BF16"),
        ("blk.0.ffn_gate_tid2eid.weight", "F32", "I32 or I64"),
        ("blk.0.ffn_up_exps.weight", "I16", "a weight type"),
    ],
)
def test_type_that_a_role_cannot_use(
    models: Path, tmp_path: Path, name: str, kind: str, expected: str
):
    def retype(tensors: GgufTensors) -> None:
        shape, _, _ = tensors[name]
        rows = int(np.prod(shape[:-1]))
        nbytes = rows * BLOCK_TYPES[kind].row_bytes(shape[-1])
        tensors[name] = (shape, BLOCK_TYPES[kind], np.zeros(nbytes, dtype=np.uint8))

    fault = gguf_fault(models, tmp_path, retype)
    assert fault.startswith(f"tensor {name} is of type {kind}, expected {expected}")


@pytest.mark.parametrize("expert", [8, -1, 2**31 - 1])
def test_expert_table_with_an_id_that_no_expert_has(models: Path, tmp_path: Path, expert: int):
    def poison(tensors: GgufTensors) -> None:
        shape, kind, data = tensors["blk.0.ffn_gate_tid2eid.weight"]
        data.view(np.int32).reshape(shape)[300, 2] = expert
        tensors["blk.0.ffn_gate_tid2eid.weight"] = (shape, kind, data)

    assert gguf_fault(models, tmp_path, poison) == (
        f"tensor blk.0.ffn_gate_tid2eid.weight sends token 300 to expert {expert}, expected 0..7"
    )


def test_expert_table_with_too_few_rows(models: Path, tmp_path: Path):
    def cut(tensors: Stored) -> None:
        name = "layers.0.ffn.gate.tid2eid"
        tensors[name] = tensors[name][:-1].clone()

    fault = official_fault(models, tmp_path, cut)
    assert fault == (
        "tensor layers.0.ffn.gate.tid2eid is [383, 3],"
        " expected [384, 3] (vocab_size, experts_per_token)"
    )


def test_embedding_with_another_number_of_rows(models: Path, tmp_path: Path):
    def cut(tensors: Stored) -> None:
        tensors["embed.weight"] = tensors["embed.weight"][:-1].clone()

    assert "embed.weight is [383, 96], expected [384, 96]" in official_fault(models, tmp_path, cut)


def test_head_dims_that_do_not_fit_the_tensors(models: Path, tmp_path: Path):
    config = {"head_dim": 32, "qk_rope_head_dim": 16}
    faults = faults_of(change_official(models / "official", tmp_path / "m", config=config))
    assert any("attn.wkv.weight is [64, 96], expected [32, 96]" in fault for fault in faults)


def test_fp8_without_scale(models: Path, tmp_path: Path):
    fault = official_fault(models, tmp_path, lambda t: t.pop("layers.0.attn.wo_a.scale"))
    assert fault == (
        "tensor layers.0.attn.wo_a.scale is missing, scales of layers.0.attn.wo_a.weight"
    )


def test_packed_fp4_without_scale(models: Path, tmp_path: Path):
    fault = official_fault(models, tmp_path, lambda t: t.pop("layers.1.ffn.experts.3.w1.scale"))
    assert "layers.1.ffn.experts.3.w1.weight" in fault


def scale_of(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (4, 4), (1,), (1, 1, 1)])
def test_block_scale_of_the_wrong_shape(models: Path, tmp_path: Path, shape: tuple[int, ...]):
    def change(tensors: Stored) -> None:
        tensors["layers.0.attn.wq_a.scale"] = scale_of(*shape)

    fault = official_fault(models, tmp_path, change)
    assert fault.startswith("tensor layers.0.attn.wq_a.scale is [")
    assert fault.endswith("one per square block, [1, 1] for 128 x 128")


def test_group_scale_of_the_wrong_shape(models: Path, tmp_path: Path):
    def change(tensors: Stored) -> None:
        tensors["layers.0.ffn.experts.0.w1.scale"] = scale_of(64, 2)

    fault = official_fault(models, tmp_path, change)
    assert fault.endswith("is [64, 2], expected [64, 3] (one per 32 inputs)")


def test_scale_of_the_wrong_type(models: Path, tmp_path: Path):
    def change(tensors: Stored) -> None:
        tensors["layers.0.attn.wq_a.scale"] = torch.zeros(1, 1)

    fault = official_fault(models, tmp_path, change)
    assert fault == "tensor layers.0.attn.wq_a.scale is of type F32, expected E8M0"


def test_tensor_scale_of_the_wrong_length(models: Path, tmp_path: Path):
    def add(tensors: GgufTensors) -> None:
        tensors["blk.0.ffn_up_exps.scale"] = f32(np.ones(3))

    fault = gguf_fault(models, tmp_path, add)
    assert fault == "tensor blk.0.ffn_up_exps.scale is F32 [3], expected F32 [8]"


def test_stack_with_another_number_of_experts(models: Path, tmp_path: Path):
    def cut(tensors: GgufTensors) -> None:
        tensors["blk.2.ffn_down_exps.weight"] = f32(np.zeros((7, 96, 64)))

    fault = gguf_fault(models, tmp_path, cut)
    assert "blk.2.ffn_down_exps.weight is [64, 96, 7], expected [64, 96, 8]" in fault


def test_first_missing_expert_stands_for_the_rest(models: Path, tmp_path: Path):
    def drop(tensors: Stored) -> None:
        for name in list(tensors):
            if name.startswith("layers.2.ffn.experts.") and ".w3." in name and ".0." not in name:
                del tensors[name]

    fault = official_fault(models, tmp_path, drop)
    assert fault.startswith("tensor layers.2.ffn.experts.1.w3.weight is missing")


def test_incomplete_mtp_block_is_a_fault(models: Path, tmp_path: Path):
    fault = official_fault(models, tmp_path, lambda t: t.pop("mtp.0.hnorm.weight"))
    assert fault == "tensor mtp.0.hnorm.weight is missing, expected [96] (hidden_size)"


def test_all_faults_come_in_one_error_and_eight_are_named(models: Path, tmp_path: Path):
    def ruin(tensors: GgufTensors) -> None:
        for name in list(tensors):
            if name.startswith("blk.1."):
                del tensors[name]
        tensors["output_norm.weight"] = f32(np.zeros(5))
        tensors["blk.0.attn_kv.weight"] = (
            (64, 96),
            BLOCK_TYPES["I8"],
            np.zeros(64 * 96, dtype=np.uint8),
        )

    path = change_gguf(models / "f32.gguf", tmp_path / "m.gguf", ruin)
    with open_checkpoint(path) as checkpoint, pytest.raises(FormatError) as caught:
        bind_weights(checkpoint)
    message = str(caught.value)
    assert len(caught.value.problems) == 36
    assert message.startswith(f"{path}: the tensors do not fit the configuration, 36 faults:")
    assert message.count("\n  tensor ") == 8
    assert message.endswith("... and 28 more")


def test_a_claim_of_many_layers_and_experts_is_answered_at_once(models: Path, tmp_path: Path):
    config: dict[str, Any] = {
        "num_hidden_layers": 512,
        "n_routed_experts": 4096,
        "compress_ratios": [0] * 512,
        "num_hash_layers": 0,
    }
    faults = faults_of(change_official(models / "official", tmp_path / "m", config=config))
    assert 512 * 10 < len(faults) < 512 * 40
