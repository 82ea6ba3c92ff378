"""Metadata that is missing, mistyped, contradictory or absurd: one typed error that says so."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from metadata_samples import (
    LAYERS,
    TOKENS,
    llamacpp_metadata,
    official_config,
    opened,
    tokenizer_metadata,
    write_config,
)

from edgedsv4.errors import FormatError, UnsupportedModelError
from edgedsv4.formats.metadata import (
    config_from_gguf,
    config_from_json,
    tokenizer_spec_from_gguf,
)

NAN, INF = float("nan"), float("inf")

OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    ("block_count", 0, "num_layers must be 1..512, found 0"),
    ("block_count", 513, "num_layers must be 1..512, found 513"),
    ("block_count", (1 << 64) - 1, "num_layers must be 1..512"),
    ("expert_count", 0, "num_experts must be 1..4096, found 0"),
    ("expert_count", 4097, "num_experts must be 1..4096, found 4097"),
    ("expert_used_count", 257, "experts_per_token 257 is more than num_experts 256"),
    ("attention.head_count", 63, "num_heads 63 is not a multiple of output_groups 8"),
    ("attention.key_length", 256, "attention.key_length 256 and attention.value_length 512"),
    ("rope.dimension_count", 63, "rope_dim must be even"),
    ("rope.dimension_count", 514, "rope_dim must be even and <= head_dim 512"),
    ("attention.indexer.key_length", 96, "index_dim must be a power of two"),
    ("attention.layer_norm_rms_epsilon", NAN, "rms_norm_eps must be a finite number above 0"),
    ("attention.layer_norm_rms_epsilon", INF, "rms_norm_eps must be a finite number above 0"),
    ("attention.layer_norm_rms_epsilon", -1e-6, "rms_norm_eps must be a finite number above 0"),
    ("hyper_connection.epsilon", NAN, "hc_eps must be a finite number above 0"),
    ("expert_weights_scale", NAN, "routed_scale must be a finite number above 0"),
    ("expert_weights_scale", -1.5, "routed_scale must be a finite number above 0"),
    ("rope.scaling.factor", NAN, "scaling factor must be 1..1048576, found nan"),
    ("rope.scaling.factor", INF, "scaling factor must be 1..1048576, found inf"),
    ("rope.scaling.factor", 0.5, "scaling factor must be 1..1048576, found 0.5"),
    ("rope.scaling.yarn_beta_fast", NAN, "rope_scaling.beta_fast must be a finite number"),
    ("rope.freq_base", INF, "rope_theta must be a finite number above 0"),
    ("rope.freq_base", -1.0, "rope_theta must be a finite number above 0"),
    ("attention.compress_rope_freq_base", NAN, "compress_rope_theta must be a finite number"),
    ("hash_layer_count", 44, "num_hash_layers must be 0..43, found 44"),
    ("vocab_size", 0, "vocab_size must be 1..16777216, found 0"),
    ("attention.compress_ratios", np.zeros(42, dtype=np.int32), "has 42 entries, expected at"),
    ("swiglu_clamp_exp", np.full(LAYERS, NAN, dtype=np.float32), "swiglu_limits must be above 0"),
    ("swiglu_clamp_exp", np.full(LAYERS, -1, dtype=np.float32), "swiglu_limits must be above 0"),
]

UNSUPPORTED: list[tuple[str, Any, str]] = [
    ("hyper_connection.count", 2, r"hc_streams must be one of \(4,\), found 2"),
    ("attention.compress_ratios", np.full(LAYERS, 2, dtype=np.int32), r"may hold \(0, 4, 128\)"),
    ("expert_gating_func", 1, r"expert_gating_func must be 4 .* found 1 \(softmax\)"),
    ("expert_gating_func", 9, r"found 9 \(unknown\)"),
    ("expert_weights_norm", False, "expert_weights_norm must be true"),
    ("leading_dense_block_count", 3, "leading_dense_block_count must be 0, found 3"),
    ("attention.head_count_kv", 8, "head_count_kv must be 1, found 8"),
    ("rope.scaling.type", "linear", "rope.scaling.type must be 'yarn' or 'none'"),
]

MISTYPED: list[tuple[str, Any]] = [
    ("block_count", "43"),
    ("block_count", 43.0),
    ("block_count", True),
    ("attention.layer_norm_rms_epsilon", 1),
    ("expert_weights_norm", 1),
    ("rope.scaling.type", 4),
    ("attention.compress_ratios", 4),
    ("attention.compress_ratios", np.zeros(LAYERS, dtype=np.float32)),
    ("attention.compress_ratios", ["0"] * LAYERS),
    ("swiglu_clamp_exp", np.zeros(LAYERS, dtype=np.int32)),
    ("attention.head_count", np.array([64, 32], dtype=np.uint32)),
    ("attention.head_count", np.array([], dtype=np.uint32)),
]


def changed(key: str, value: Any) -> dict[str, Any]:
    return llamacpp_metadata() | {f"deepseek4.{key}": value}


@pytest.mark.parametrize(("key", "value", "message"), OUT_OF_RANGE)
def test_value_out_of_range(key: str, value: Any, message: str):
    with pytest.raises(FormatError, match=message) as caught:
        config_from_gguf(opened(changed(key, value)))
    assert not isinstance(caught.value, UnsupportedModelError)


@pytest.mark.parametrize(("key", "value", "message"), UNSUPPORTED)
def test_sound_value_that_cannot_be_run(key: str, value: Any, message: str):
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_gguf(opened(changed(key, value)))


@pytest.mark.parametrize(("key", "value"), MISTYPED)
def test_wrong_type_names_the_key(key: str, value: Any):
    with pytest.raises(FormatError, match=rf"key deepseek4\.{key} must be an? "):
        config_from_gguf(opened(changed(key, value)))


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "embedding_length",
        "attention.head_count",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.q_lora_rank",
        "attention.sliding_window",
        "attention.indexer.top_k",
        "attention.output_group_count",
        "attention.compress_ratios",
        "attention.compress_rope_freq_base",
        "rope.dimension_count",
        "expert_count",
        "expert_feed_forward_length",
        "expert_weights_scale",
        "swiglu_clamp_exp",
        "hash_layer_count",
        "hyper_connection.count",
    ],
)
def test_missing_key_is_the_only_fault_named(key: str):
    metadata = llamacpp_metadata()
    del metadata[f"deepseek4.{key}"]
    with pytest.raises(FormatError) as caught:
        config_from_gguf(opened(metadata))
    assert caught.value.problems == (f"key deepseek4.{key} is missing",)


def test_all_faults_come_in_one_error_and_eight_are_named():
    with pytest.raises(FormatError) as caught:
        config_from_gguf(opened({"general.architecture": "deepseek4"}))
    assert len(caught.value.problems) == 27
    message = str(caught.value)
    assert message.count(" is missing") == 8
    assert "... and 19 more" in message


def test_missing_keys_and_values_out_of_range_come_together():
    metadata = changed("expert_count", 0) | {"deepseek4.rope.freq_base": NAN}
    del metadata["deepseek4.embedding_length"]
    with pytest.raises(FormatError) as caught:
        config_from_gguf(opened(metadata))
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek41", "DeepSeek-V4.1 cannot be run yet"),
        ("dflash", "DSpark drafter"),
        ("deepseek4_mtp_support", "MTP block"),
        ("clip", "vision projector"),
        ("llama", "this model cannot be run"),
    ],
)
def test_other_architecture_is_unsupported(name: str, reason: str):
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        config_from_gguf(opened(llamacpp_metadata() | {"general.architecture": name}))
    assert "supported is 'deepseek4'" in str(caught.value)


@pytest.mark.parametrize("architecture", [4, True, None])
def test_architecture_of_another_type_or_missing(architecture: Any):
    metadata = llamacpp_metadata() | {"general.architecture": architecture}
    if architecture is None:
        del metadata["general.architecture"]
    with pytest.raises(FormatError, match=r"general\.architecture"):
        config_from_gguf(opened(metadata))


def test_engram_keys_betray_an_early_v41_conversion():
    metadata = changed("engram.head_count", 8)
    with pytest.raises(UnsupportedModelError, match=r"belongs to DeepSeek-V4\.1"):
        config_from_gguf(opened(metadata))


def test_engram_tensors_betray_an_early_v41_conversion():
    tensors = {"blk.1.engram_embd.weight": None}
    with pytest.raises(UnsupportedModelError, match=r"belongs to DeepSeek-V4\.1"):
        config_from_gguf(opened(llamacpp_metadata(), tensors))


@pytest.mark.parametrize("key", sorted(llamacpp_metadata() | tokenizer_metadata()))
def test_any_key_may_be_of_any_type_without_another_exception(key: str):
    values = (True, -1, 1 << 63, 1.5, NAN, "x", [], ["x"], [[]], np.zeros(0), np.array([NAN]))
    for value in values:
        file = opened(llamacpp_metadata() | tokenizer_metadata() | {key: value})
        with contextlib.suppress(FormatError):
            config = config_from_gguf(file)
            tokenizer_spec_from_gguf(file, config.vocab_size)


def test_a_huge_string_does_not_fill_the_message():
    with pytest.raises(FormatError) as caught:
        config_from_gguf(opened(changed("block_count", "x" * 10_000_000)))
    assert len(str(caught.value)) < 300


def refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(FormatError, match=message) as caught:
        config_from_json(path)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not usable JSON"),
        ("[]", "must hold a JSON object, found list"),
        ("3", "must hold a JSON object, found int"),
        ("null", "must hold a JSON object, found NoneType"),
        ('{"a": 1', "is not usable JSON"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": -Infinity}', "-Infinity is not a JSON number"),
        ('{"a": 1e999}', "does not fit a float"),
        ('{"a": 1, "a": 2}', "name 'a' appears twice"),
        (b'{"a": "\xff"}', "is not usable JSON"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deep"),
        ("[" * 200_000, "nested too deep"),
        ('{"a": ' + "9" * 5000 + "}", "an integer of 5000 digits"),
    ],
    ids=[
        "empty",
        "list",
        "number",
        "null",
        "truncated",
        "nan",
        "infinity",
        "overflow",
        "duplicate",
        "not-utf8",
        "deep-objects",
        "deep-lists",
        "giant-integer",
    ],
)
def test_json_that_cannot_be_used(tmp_path: Path, text: str | bytes, message: str):
    refused(tmp_path, text, message)


def test_json_larger_than_any_configuration_is_not_parsed(tmp_path: Path):
    refused(tmp_path, " " * (5 << 20), "expected at most 1,048,576")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": "43"}, "num_hidden_layers must be an integer, found '43'"),
        ({"num_hidden_layers": 43.0}, "num_hidden_layers must be an integer, found 43.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer, found True"),
        ({"num_hidden_layers": 0}, "num_layers must be 1..512, found 0"),
        ({"num_hidden_layers": 10**30}, "num_layers must be 1..512"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a finite number above 0"),
        ({"hc_eps": 0}, "hc_eps must be a finite number above 0"),
        ({"compress_ratios": 4}, "compress_ratios must be a list"),
        ({"compress_ratios": [4.5] * 44}, "compress_ratios must hold integers only"),
        ({"compress_ratios": [0] * 42}, "has 42 entries, expected at least one per layer"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"factor": 16}}, "rope_scaling.factor needs a type beside it"),
        ({"swiglu_limit": None}, "swiglu_limit is missing"),
        ({"swiglu_limit": -1}, "swiglu_limits must be above 0"),
        ({"eos_token_id": 129280}, "eos_id must be below vocab_size 129280"),
        ({"eos_token_id": "end"}, "eos_token_id must be an integer"),
        ({"num_experts_per_tok": 257}, "experts_per_token 257 is more than num_experts 256"),
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": 4}, "model_type must be a string"),
    ],
)
def test_configuration_entry_that_is_wrong(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        config_from_json(write_config(tmp_path, changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v41"}, r"DeepSeek-V4\.1 cannot be run yet"),
        ({"model_type": "llama"}, "it cannot be run"),
        ({"hc_mult": 8}, "hc_streams must be one of"),
        ({"compress_ratios": [2] * 44}, "compress_ratios may hold"),
        ({"scoring_func": "softmax"}, "scoring_func must be 'sqrtsoftplus'"),
        ({"norm_topk_prob": False}, "norm_topk_prob must be True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False"),
        ({"num_key_value_heads": 8}, "num_key_value_heads must be 1"),
        ({"rope_scaling": {"type": "linear"}}, "type must be 'yarn' or 'default'"),
        ({"compress_ratios": None, "layer_types": ["full_attention"] * 43}, "layer_types may hold"),
    ],
)
def test_configuration_that_cannot_be_run(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_json(write_config(tmp_path, changes))


@pytest.mark.parametrize("name", sorted(official_config()))
def test_any_entry_may_be_of_any_type_without_another_exception(tmp_path: Path, name: str):
    for value in (None, True, -1, 1.5, "x", [], [None], {}, {"type": []}, 10**39):
        with contextlib.suppress(FormatError):
            config_from_json(write_config(tmp_path, {name: value}))


def test_empty_configuration_lists_every_entry(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "deepseek_v4"}))
    with pytest.raises(FormatError) as caught:
        config_from_json(path)
    assert len(caught.value.problems) > 20


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", TOKENS[:-1], "tokens has 7 entries, the embedding has 8 rows"),
        ("tokens", [*TOKENS[:-1], "a"], r"\[3\] and \[7\] have the same text 'a'"),
        ("tokens", np.zeros(8, dtype=np.int32), "tokens must be an array of strings"),
        ("tokens", [["a"]] * 8, "tokens must be an array of strings"),
        ("tokens", None, "tokens is missing"),
        ("token_type", np.ones(7, dtype=np.int32), "token_type has 7 entries, tokens has 8"),
        ("token_type", np.full(8, 7, dtype=np.int32), r"token_type\[0\] must be 1..6, found 7"),
        ("token_type", ["1"] * 8, "token_type must be an array of integers"),
        ("token_type", None, "token_type is missing"),
        ("merges", ["ab"], r"merges\[0\] 'ab' must be two parts"),
        ("merges", ["a b c"], r"merges\[0\] 'a b c' must be two parts"),
        ("merges", [" b"], r"merges\[0\] ' b' must be two parts"),
        ("merges", [""], r"merges\[0\] '' must be two parts"),
        ("merges", ["a b", "a z"], r"merges\[1\] 'a z' needs the token 'z'"),
        ("merges", ["b c"], r"merges\[0\] 'b c' needs the token 'bc'"),
        ("merges", None, "merges is missing"),
        ("bos_token_id", 8, "bos_token_id must be below 8, found 8"),
        ("eos_token_id", -1, "eos_token_id must be below 8, found -1"),
        ("padding_token_id", (1 << 64) - 1, "padding_token_id must be below 8"),
        ("bos_token_id", "0", "bos_token_id must be an integer"),
        ("model", "llama", "model must be 'gpt2'"),
        ("model", None, "model must be 'gpt2'"),
        ("pre", 4, "pre must be a string"),
    ],
)
def test_tokenizer_that_contradicts_itself(key: str, value: Any, message: str):
    metadata = tokenizer_metadata() | {f"tokenizer.ggml.{key}": value}
    if value is None:
        del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(FormatError, match=message):
        tokenizer_spec_from_gguf(opened(metadata), len(TOKENS))


def test_all_faults_of_a_tokenizer_come_in_one_error():
    metadata = tokenizer_metadata() | {
        "tokenizer.ggml.merges": ["ab"],
        "tokenizer.ggml.bos_token_id": 99,
    }
    with pytest.raises(FormatError) as caught:
        tokenizer_spec_from_gguf(opened(metadata), 9)
    assert len(caught.value.problems) == 3
