"""Writes tiny models as the checkpoint files that exist in the wild, with other people's packages.

`write_official` makes a directory in DeepSeek's layout (config.json and safetensors),
`write_gguf` one GGUF file with llama.cpp's names. Both return the values that a reader must find,
so that rounding to FP8, FP4 or Q8_0 is part of the fixture and never of a tolerance.
"""

# ruff: noqa: RUF001 -- the special tokens are spelled with U+FF5C

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig, RopeScaling

Tensors = dict[str, np.ndarray]
"""Official name -> array, row-major [out, in]."""

TypeRule = Callable[[str, np.ndarray], Type]
"""(official name, array) -> GGUF type; a type that the row width does not fit becomes F16."""

_FP8_LEAVES = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "e_proj", "h_proj")
_BF16_LEAVES = ("embed", "head", "norm", "gate", "wgate", "weights_proj")
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


def write_official(
    directory: Path,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    quantised: bool = False,
) -> Tensors:
    """Write config.json and model.safetensors.

    Args:
        directory: made if missing.
        config: shape of the model.
        tensors: official name -> array.
        quantised: False stores float32; True stores FP8 blocks of 128x128 with E8M0 scales,
        packed FP4 experts, BF16
            matrices and norms, as the released checkpoints do.
    Returns:
        The values inside the file, float32 (expert tables int64).
    """
    directory.mkdir(parents=True, exist_ok=True)
    record = config_json(config)
    if quantised:
        record["torch_dtype"] = "bfloat16"
        record["expert_dtype"] = "fp4"
        record["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    (directory / "config.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    stored: dict[str, torch.Tensor] = {}
    values: Tensors = {}
    for name, array in tensors.items():
        parts, values[name] = _official_parts(name, array) if quantised else _plain(name, array)
        stored |= parts
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return values


def _plain(name: str, array: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    return {name: torch.from_numpy(np.ascontiguousarray(array))}, array


def _official_parts(name: str, array: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """(stored tensors, the values they stand for) of one official tensor."""
    stem, _, last = name.rpartition(".")
    leaf = stem.rpartition(".")[2]
    if last != "weight":
        return _plain(name, array)
    if ".experts." in name:
        return _fp4(stem, array)
    if ".compressor." not in name and (leaf in _FP8_LEAVES or ".shared_experts." in name):
        return _fp8(stem, array)
    tensor = torch.from_numpy(np.ascontiguousarray(array)).bfloat16()
    return {name: tensor}, tensor.float().numpy()


def _fp8(stem: str, array: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    rows, columns = array.shape
    padded = np.zeros((-(-rows // 128) * 128, -(-columns // 128) * 128), dtype=np.float32)
    padded[:rows, :columns] = array
    blocks = padded.reshape(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    exponents = _exponents(np.abs(blocks).max(axis=(1, 3)), largest=448.0)
    scales = np.exp2(exponents.astype(np.float32)).repeat(128, 0).repeat(128, 1)[:rows, :columns]
    codes = torch.from_numpy(array / scales).to(torch.float8_e4m3fn)
    stored = {f"{stem}.weight": codes, f"{stem}.scale": _e8m0(exponents)}
    return stored, codes.float().numpy() * scales


def _fp4(stem: str, array: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    rows, columns = array.shape
    blocks = array.reshape(rows, columns // 32, 32)
    exponents = _exponents(np.abs(blocks).max(axis=2), largest=6.0)
    scales = np.exp2(exponents.astype(np.float32)).repeat(32, 1)
    scaled = array / scales
    codes = np.abs(np.abs(scaled)[..., None] - _E2M1).argmin(-1).astype(np.uint8)
    signed = np.where(scaled < 0, -_E2M1[codes], _E2M1[codes])
    codes |= (scaled < 0).astype(np.uint8) << 3
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).view(np.int8)
    stored = {f"{stem}.weight": torch.from_numpy(packed), f"{stem}.scale": _e8m0(exponents)}
    return stored, (signed * scales).astype(np.float32)


def _exponents(largest_values: np.ndarray, *, largest: float) -> np.ndarray:
    """Power-of-two exponents such that no value exceeds `largest` units."""
    return np.ceil(np.log2(np.maximum(largest_values, 1e-30) / largest)).astype(np.int32)


def _e8m0(exponents: np.ndarray) -> torch.Tensor:
    codes = np.clip(exponents + 127, 0, 254).astype(np.uint8)
    return torch.from_numpy(codes).view(torch.float8_e8m0fnu)


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of an official checkpoint of this model."""
    scaling = config.rope_scaling
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": 1,
        "head_dim": config.head_dim,
        "qk_rope_head_dim": config.rope_dim,
        "q_lora_rank": config.q_lora_rank,
        "o_groups": config.output_groups,
        "o_lora_rank": config.output_lora_rank,
        "sliding_window": config.window,
        "compress_ratios": [*config.compress_ratios, *[0] * config.num_draft_layers],
        "num_nextn_predict_layers": config.num_draft_layers,
        "index_n_heads": config.index_heads,
        "index_head_dim": config.index_dim,
        "index_topk": config.index_topk,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "n_shared_experts": config.num_shared_experts,
        "moe_intermediate_size": config.expert_width,
        "num_hash_layers": config.num_hash_layers,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": config.routed_scale,
        "swiglu_limit": config.swiglu_limits[0],
        "hidden_act": "silu",
        "hc_mult": config.hc_streams,
        "hc_sinkhorn_iters": config.hc_sinkhorn_iterations,
        "hc_eps": config.hc_eps,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "compress_rope_theta": config.compress_rope_theta,
        "max_position_embeddings": config.max_context,
        "rope_scaling": None if scaling is None else yarn_json(scaling),
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }


def yarn_json(scaling: RopeScaling) -> dict[str, Any]:
    """The `rope_scaling` record of a `config.json`."""
    return {
        "type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_context,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
    }


def float32_types(_name: str, _array: np.ndarray) -> Type:
    """Every tensor F32."""
    return Type.F32


def llamacpp_types(name: str, array: np.ndarray) -> Type:
    """What llama.cpp's converter writes: MXFP4 experts, Q8_0 for FP8 sources, else BF16 or F32."""
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if not name.endswith(".weight") or array.ndim < 2:
        return Type.F32
    if ".experts." in name:
        return Type.MXFP4
    if ".compressor." not in name and (leaf in _FP8_LEAVES or ".shared_experts." in name):
        return Type.Q8_0
    return Type.BF16


def ds4_types(name: str, array: np.ndarray) -> Type:
    """The layout of ds4's files (F16 small, Q8_0 dense), with Q4_0 in place of its experts."""
    if array.ndim < 2:
        return Type.F32
    if ".experts." in name:
        return Type.Q4_0
    dense = ".compressor." not in name and ".indexer." not in name
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if dense and (leaf in _FP8_LEAVES or ".shared_experts." in name or name == "head.weight"):
        return Type.Q8_0
    return Type.F16


TYPE_RULES: dict[str, TypeRule] = {"f32": float32_types, "a": llamacpp_types, "b": ds4_types}

_GGUF_ROOT = {
    "embed.weight": "token_embd.weight",
    "head.weight": "output.weight",
    "norm.weight": "output_norm.weight",
    "hc_head_fn": "output_hc_fn.weight",
    "hc_head_base": "output_hc_base.weight",
    "hc_head_scale": "output_hc_scale.weight",
}

_GGUF_LEAVES = {
    "attn.attn_sink": "attn_sinks",
    "attn.wq_a": "attn_q_a",
    "attn.q_norm": "attn_q_a_norm",
    "attn.wq_b": "attn_q_b",
    "attn.wkv": "attn_kv",
    "attn.kv_norm": "attn_kv_a_norm",
    "attn.wo_a": "attn_output_a",
    "attn.wo_b": "attn_output_b",
    **{
        f"attn.{ours}compressor.{a}": f"{theirs}_compressor_{b}"
        for ours, theirs in (("", "attn"), ("indexer.", "indexer"))
        for a, b in (("wkv", "kv"), ("wgate", "gate"), ("ape", "ape"), ("norm", "norm"))
    },
    "attn.indexer.wq_b": "indexer.attn_q_b",
    "attn.indexer.weights_proj": "indexer.proj",
    "ffn.gate": "ffn_gate_inp",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid",
    "ffn.shared_experts.w1": "ffn_gate_shexp",
    "ffn.shared_experts.w3": "ffn_up_shexp",
    "ffn.shared_experts.w2": "ffn_down_shexp",
}


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    types: Literal["f32", "a", "b"] | TypeRule = "f32",
    tokenizer: bool = False,
) -> Tensors:
    """Write one GGUF file under llama.cpp's tensor names; drafter blocks keep their `mtp.N.`
    prefix, as in ds4's files.

    Args:
        path: file to write.
        config: shape of the model.
        tensors: official name -> array.
        types: storage types: all F32, llama.cpp's ("a"), ds4's ("b"), or a rule.
        tokenizer: add a byte-level tokenizer (see `tokenizer_tokens`).
    Returns:
        Official name -> the values inside the file, float32 (expert tables int64).
    """
    rule = TYPE_RULES[types] if isinstance(types, str) else types
    writer = gguf.GGUFWriter(path, "deepseek4")
    _add_metadata(writer, config)
    if tokenizer:
        _add_tokenizer(writer, config)
    values: Tensors = {}
    for name, array in tensors.items():
        if ".experts." in name:
            continue
        if name.endswith("tid2eid"):
            writer.add_tensor(gguf_name(name), array.astype(np.int32))
            values[name] = array
        else:
            values[name] = _add(writer, gguf_name(name), array, rule(name, array))
    values |= _add_experts(writer, config, tensors, rule)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def gguf_name(name: str) -> str:
    """GGUF name of an official tensor (routed experts have none of their own)."""
    if name in _GGUF_ROOT:
        return _GGUF_ROOT[name]
    kind, index, leaf = name.split(".", 2)
    prefix = f"blk.{index}" if kind == "layers" else f"{kind}.{index}"
    if leaf == "ffn.gate.bias":
        return f"{prefix}.exp_probs_b.bias"
    leaf = leaf.removesuffix(".weight")
    return f"{prefix}.{_GGUF_LEAVES.get(leaf, leaf)}.weight"


def _add(writer: gguf.GGUFWriter, name: str, array: np.ndarray, wanted: Type) -> np.ndarray:
    block = gguf.GGML_QUANT_SIZES[wanted][0]
    kind = wanted if array.shape[-1] % block == 0 else Type.F16
    if kind in (Type.F32, Type.F16):
        data = array.astype(np.float32 if kind == Type.F32 else np.float16)
        writer.add_tensor(name, data)
        return data.astype(np.float32)
    data = gguf.quants.quantize(np.ascontiguousarray(array, dtype=np.float32), kind)
    writer.add_tensor(name, data, raw_dtype=kind)
    return gguf.quants.dequantize(data, kind).reshape(array.shape).astype(np.float32)


def _add_experts(
    writer: gguf.GGUFWriter, config: ModelConfig, tensors: Mapping[str, np.ndarray], rule: TypeRule
) -> Tensors:
    values: Tensors = {}
    blocks = [f"layers.{i}" for i in range(config.num_layers)]
    for block in [*blocks, *(f"mtp.{i}" for i in range(config.num_draft_layers))]:
        for part, theirs in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            names = [f"{block}.ffn.experts.{e}.{part}.weight" for e in range(config.num_experts)]
            stacked = np.stack([tensors[name] for name in names])
            target = gguf_name(f"{block}.ffn_{theirs}_exps")
            stored = _add(writer, target, stacked, rule(names[0], stacked[0]))
            values |= dict(zip(names, stored, strict=True))
    return values


def _add_metadata(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_name("tiny")
    integers = {
        "vocab_size": config.vocab_size,
        "block_count": config.num_layers,
        "context_length": config.max_context,
        "embedding_length": config.hidden_size,
        "embedding_length_out": config.hidden_size * config.hc_streams,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": 1,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.sliding_window": config.window,
        "attention.output_group_count": config.output_groups,
        "attention.output_lora_rank": config.output_lora_rank,
        "attention.indexer.head_count": config.index_heads,
        "attention.indexer.key_length": config.index_dim,
        "attention.indexer.top_k": config.index_topk,
        "rope.dimension_count": config.rope_dim,
        "expert_count": config.num_experts,
        "expert_used_count": config.experts_per_token,
        "expert_shared_count": config.num_shared_experts,
        "expert_feed_forward_length": config.expert_width,
        "expert_gating_func": 4,
        "hash_layer_count": config.num_hash_layers,
        "hyper_connection.count": config.hc_streams,
        "hyper_connection.sinkhorn_iterations": config.hc_sinkhorn_iterations,
    }
    floats = {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.compress_rope_freq_base": config.compress_rope_theta,
        "rope.freq_base": config.rope_theta,
        "expert_weights_scale": config.routed_scale,
        "hyper_connection.epsilon": config.hc_eps,
    }
    if config.num_draft_layers:
        integers["nextn_predict_layers"] = config.num_draft_layers
    if config.rope_scaling is not None:
        writer.add_string("deepseek4.rope.scaling.type", "yarn")
        integers["rope.scaling.original_context_length"] = config.rope_scaling.original_context
        floats["rope.scaling.factor"] = config.rope_scaling.factor
        floats["rope.scaling.yarn_beta_fast"] = config.rope_scaling.beta_fast
        floats["rope.scaling.yarn_beta_slow"] = config.rope_scaling.beta_slow
    for key, number in integers.items():
        writer.add_uint32(f"deepseek4.{key}", number)
    for key, value in floats.items():
        writer.add_float32(f"deepseek4.{key}", float(value))
    writer.add_bool("deepseek4.expert_weights_norm", True)
    writer.add_array("deepseek4.swiglu_clamp_exp", [float(x) for x in config.swiglu_limits])
    writer.add_array(
        "deepseek4.swiglu_clamp_shexp", [float(x) for x in config.shared_swiglu_limits]
    )
    ratios = [*config.compress_ratios, *[0] * config.num_draft_layers]
    writer.add_array("deepseek4.attention.compress_ratios", ratios)


SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
)
"""First ids of the byte-level tokenizer; 256 bytes follow, then unused slots to the end."""


def tokenizer_tokens(vocab_size: int) -> tuple[list[str], list[int]]:
    """(token texts, token types) of a byte-level tokenizer whose only merge makes "er"."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    letters = [chr(byte if byte in printable else next(extra)) for byte in range(256)]
    unused = vocab_size - len(SPECIAL_TOKENS) - 257
    fillers = (f"<｜place▁holder▁no▁{i}｜>" for i in range(unused))
    tokens = [*SPECIAL_TOKENS, *letters, "er", *fillers]
    types = [3] * len(SPECIAL_TOKENS) + [1] * 257 + [3] * unused
    return tokens, types


def _add_tokenizer(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    tokens, types = tokenizer_tokens(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("joyai-llm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_array("tokenizer.ggml.merges", ["e r"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
