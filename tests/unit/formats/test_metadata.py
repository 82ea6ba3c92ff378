"""Model configuration and tokenizer out of sound files, in every dialect."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from metadata_samples import (
    LAYERS,
    RATIOS,
    TOKENS,
    ds4_metadata,
    llamacpp_metadata,
    opened,
    tokenizer_metadata,
    write_config,
)

from edgedsv4.config import RopeScaling
from edgedsv4.errors import UnsupportedModelError
from edgedsv4.formats.metadata import (
    config_from_gguf,
    config_from_json,
    tokenizer_spec_from_gguf,
)


def test_both_gguf_dialects_give_the_same_configuration():
    assert config_from_gguf(opened(ds4_metadata())) == config_from_gguf(opened(llamacpp_metadata()))


def test_gguf_and_config_json_give_the_same_configuration(tmp_path: Path):
    official = config_from_json(write_config(tmp_path))
    gguf = config_from_gguf(opened(llamacpp_metadata()))
    same = {"architecture": "", "num_draft_layers": 0, "bos_id": 0, "eos_id": 1}
    assert dataclasses.replace(official, **same) == dataclasses.replace(gguf, **same)


def test_flash_values_arrive_in_their_fields():
    config = config_from_gguf(opened(llamacpp_metadata()))
    assert config.compress_ratios == tuple(RATIOS[:LAYERS])
    assert config.rope_scaling == RopeScaling(factor=16.0, original_context=65536)
    assert (config.rope_theta, config.compress_rope_theta) == (10000.0, 160000.0)
    assert config.swiglu_limits == (10.0,) * LAYERS
    assert config.group_width == 4096


def test_missing_vocab_size_is_the_number_of_tokens():
    metadata = llamacpp_metadata() | tokenizer_metadata()
    del metadata["deepseek4.vocab_size"]
    assert config_from_gguf(opened(metadata)).vocab_size == len(TOKENS)


def test_missing_shared_clamp_is_the_routed_one():
    metadata = llamacpp_metadata()
    del metadata["deepseek4.swiglu_clamp_shexp"]
    metadata["deepseek4.swiglu_clamp_exp"] = np.full(LAYERS, 7, dtype=np.float32)
    assert config_from_gguf(opened(metadata)).shared_swiglu_limits == (7.0,) * LAYERS


def test_a_clamp_of_zero_means_no_clamp():
    metadata = llamacpp_metadata()
    metadata["deepseek4.swiglu_clamp_shexp"] = np.zeros(LAYERS, dtype=np.float32)
    assert config_from_gguf(opened(metadata)).shared_swiglu_limits == (math.inf,) * LAYERS


def test_mtp_block_claimed_but_absent_counts_as_none():
    assert config_from_gguf(opened(ds4_metadata())).num_draft_layers == 0


def test_llamacpp_mtp_block_is_not_a_layer_of_the_main_model():
    metadata = llamacpp_metadata()
    metadata["deepseek4.block_count"] = LAYERS + 1
    metadata["deepseek4.nextn_predict_layers"] = 1
    config = config_from_gguf(opened(metadata, {f"blk.{LAYERS}.nextn.eh_proj.weight": None}))
    assert (config.num_layers, config.num_draft_layers) == (LAYERS, 1)


def test_ds4_mtp_block_inside_the_file_is_counted():
    config = config_from_gguf(opened(ds4_metadata(), {"mtp.0.e_proj.weight": None}))
    assert (config.num_layers, config.num_draft_layers) == (LAYERS, 1)


def test_dspark_stages_are_not_an_mtp_block():
    tensors = {"mtp.0.e_proj.weight": None, "mtp.1.attn_q_a.weight": None}
    assert config_from_gguf(opened(ds4_metadata(), tensors)).num_draft_layers == 0


def test_early_name_of_the_compressed_rope_base_is_read():
    metadata = llamacpp_metadata()
    del metadata["deepseek4.attention.compress_rope_freq_base"]
    metadata["deepseek4.rope.freq_base_swa"] = 40000.0
    assert config_from_gguf(opened(metadata)).compress_rope_theta == 40000.0


def test_group_counts_are_ignored():
    metadata = llamacpp_metadata() | {
        "deepseek4.expert_group_count": 8,
        "deepseek4.expert_group_used_count": 4,
    }
    assert config_from_gguf(opened(metadata)) == config_from_gguf(opened(llamacpp_metadata()))


def test_expert_width_may_be_given_per_layer():
    metadata = llamacpp_metadata()
    metadata["deepseek4.expert_feed_forward_length"] = np.full(LAYERS, 2048, dtype=np.uint32)
    assert config_from_gguf(opened(metadata)).expert_width == 2048


def test_without_scaling_keys_rope_is_unscaled():
    metadata = {k: v for k, v in llamacpp_metadata().items() if ".rope.scaling." not in k}
    assert config_from_gguf(opened(metadata)).rope_scaling is None


def test_longer_ratio_lists_are_cut_to_the_layers(tmp_path: Path):
    ratios = [*RATIOS, 0, 0]
    config = config_from_json(write_config(tmp_path, {"compress_ratios": ratios}))
    assert config.compress_ratios == tuple(RATIOS[:LAYERS])


def test_dspark_entries_mean_no_mtp_block(tmp_path: Path):
    changes = {"dspark_block_size": 5, "num_nextn_predict_layers": 3}
    assert config_from_json(write_config(tmp_path, changes)).num_draft_layers == 0


@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_scaling_type_has_two_spellings(tmp_path: Path, name: str):
    scaling = {name: "yarn", "factor": 8, "original_max_position_embeddings": 4096}
    config = config_from_json(write_config(tmp_path, {"rope_scaling": scaling}))
    assert config.rope_scaling == RopeScaling(factor=8.0, original_context=4096)


def test_flat_rope_parameters_are_read(tmp_path: Path):
    parameters = {"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 4096}
    changes = {"rope_scaling": None, "rope_parameters": parameters}
    config = config_from_json(write_config(tmp_path, changes))
    assert config.rope_scaling == RopeScaling(factor=8.0, original_context=4096)


def test_default_scaling_type_means_unscaled(tmp_path: Path):
    config = config_from_json(write_config(tmp_path, {"rope_scaling": {"rope_type": "default"}}))
    assert config.rope_scaling is None


def test_nested_rope_parameters_and_layer_types_are_read(tmp_path: Path):
    """The file that `DeepseekV4Config` of transformers 5 writes."""
    names = {0: "sliding_attention", 4: "compressed_sparse_attention"}
    kinds = [names.get(ratio, "heavily_compressed_attention") for ratio in RATIOS[:LAYERS]]
    changes = {
        "compress_ratios": None,
        "qk_rope_head_dim": None,
        "num_hash_layers": None,
        "rope_scaling": None,
        "layer_types": kinds,
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * (LAYERS - 3),
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 128,
        },
        "partial_rotary_factor": 0.125,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0},
            "compress": {
                "rope_type": "yarn",
                "rope_theta": 160000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 65536,
                "beta_fast": 32,
                "beta_slow": 1,
                "attention_factor": 1.0,
            },
        },
    }
    (tmp_path / "new").mkdir()
    new = config_from_json(write_config(tmp_path / "new", changes))
    assert new == config_from_json(write_config(tmp_path))


def test_the_first_of_several_end_tokens_is_taken(tmp_path: Path):
    assert config_from_json(write_config(tmp_path, {"eos_token_id": [1, 7]})).eos_id == 1


def test_tokenizer_of_a_gguf_file_is_read():
    spec = tokenizer_spec_from_gguf(opened(tokenizer_metadata()), len(TOKENS))
    assert spec is not None
    assert list(spec.tokens) == TOKENS
    assert list(spec.token_types) == [3, 3, 3, 1, 1, 1, 1, 1]
    assert list(spec.merges) == ["a b", "ab c"]
    assert (spec.bos_id, spec.eos_id, spec.pad_id, spec.pre) == (0, 1, 2, "joyai-llm")


def test_the_older_name_of_the_pre_tokenizer_is_accepted():
    metadata = tokenizer_metadata() | {"tokenizer.ggml.pre": "deepseek-v3"}
    spec = tokenizer_spec_from_gguf(opened(metadata))
    assert spec is not None
    assert spec.pre == "deepseek-v3"


def test_a_missing_pre_tokenizer_reads_as_empty():
    metadata = tokenizer_metadata()
    del metadata["tokenizer.ggml.pre"]
    spec = tokenizer_spec_from_gguf(opened(metadata))
    assert spec is not None
    assert spec.pre == ""


def test_a_file_without_tokenizer_has_none():
    assert tokenizer_spec_from_gguf(opened(llamacpp_metadata())) is None


@pytest.mark.parametrize("pre", ["deepseek-llm", "default"])
def test_pre_tokenizers_that_split_differently_are_refused(pre: str):
    metadata = tokenizer_metadata() | {"tokenizer.ggml.pre": pre}
    with pytest.raises(UnsupportedModelError, match=f"found '{pre}'"):
        tokenizer_spec_from_gguf(opened(metadata))
