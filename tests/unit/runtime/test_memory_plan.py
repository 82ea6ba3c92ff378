"""The memory plan against byte counts worked out from the published shapes."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from tiny_model import tiny_config

from edgedsv4.config import EngineOptions, ModelConfig
from edgedsv4.runtime.memory_plan import (
    DEFAULT_CONTEXT,
    StateLayout,
    plan_memory,
    weight_items,
    workspace_bytes,
)

GIB = 1 << 30


def flash() -> ModelConfig:
    return tiny_config(
        compress_ratios=(0, 0, *(4, 128) * 20, 4),
        vocab_size=129_280,
        hidden_size=4096,
        num_heads=64,
        head_dim=512,
        rope_dim=64,
        q_lora_rank=1024,
        output_groups=8,
        output_lora_rank=1024,
        window=128,
        index_heads=64,
        index_dim=128,
        index_topk=512,
        num_experts=256,
        experts_per_token=6,
        expert_width=2048,
        num_hash_layers=3,
        max_context=1 << 20,
    )


def test_row_sizes_of_the_released_models() -> None:
    layout = StateLayout(flash())
    assert (layout.row_bytes, layout.index_key_bytes) == (584, 68)


def test_last_scale_group_may_be_shorter() -> None:
    layout = StateLayout(tiny_config(head_dim=128, rope_dim=32, index_dim=64))
    assert (layout.row_bytes, layout.index_key_bytes) == (96 + 64 + 8, 32 + 2)


def test_flash_grows_by_3514_and_a_quarter_bytes_per_token() -> None:
    assert StateLayout(flash()).bytes_per_token == Fraction("3514.25")


@pytest.mark.parametrize(("dtype", "per_token"), [("bf16", 6880), ("f32", 13760), ("f64", 27520)])
def test_exact_profile_grows_by_rows_of_the_compute_type(dtype: str, per_token: int) -> None:
    assert StateLayout(flash(), "exact", dtype).bytes_per_token == per_token


@pytest.mark.parametrize(
    ("context", "mib"), [(4096, 16.8), (32_768, 112.9), (131_072, 442.3), (1 << 20, 3517)]
)
def test_flash_state_without_spare_slots_is_the_published_size(context: int, mib: float) -> None:
    layout = StateLayout(flash())
    rings_without_spare = layout.ring_bytes // 2
    growing = layout.compressed_row_bytes(context) + layout.index_bytes(context)
    assert (growing + rings_without_spare) / (1 << 20) == pytest.approx(mib, rel=4e-3)


def test_rows_appear_only_when_their_window_is_complete() -> None:
    layout = StateLayout(tiny_config(compress_ratios=(4, 128)))
    rows = [layout.compressed_row_bytes(n) // layout.row_bytes for n in (3, 4, 127, 128)]
    assert rows == [0, 1, 31, 33]


def test_partial_windows_hold_value_and_gate_of_every_raw_row() -> None:
    layout = StateLayout(flash())
    ratio_128 = 256 * 512 * 2 * 4
    ratio_4 = (8 + 128) * (2 * 512 + 2 * 128) * 2 * 4
    assert layout.partial_window_bytes == 20 * ratio_128 + 21 * ratio_4


def test_window_only_model_does_not_grow() -> None:
    layout = StateLayout(tiny_config(compress_ratios=(0, 0)))
    assert layout.bytes_per_token == 0
    assert layout.state_bytes(10) == layout.state_bytes(10_000)


def test_workspace_does_not_depend_on_the_context() -> None:
    small = workspace_bytes(tiny_config(max_context=4096), 64, "f32")
    assert workspace_bytes(tiny_config(max_context=1 << 20), 64, "f32") == small


def test_plan_that_fits_has_no_limiting_item() -> None:
    plan = plan_memory(flash(), {"attention": GIB}, EngineOptions(), available_bytes=8 * GIB)
    assert plan.fits
    assert plan.limiting_item is None


def test_unasked_context_is_the_documented_default() -> None:
    plan = plan_memory(flash(), {}, EngineOptions(), available_bytes=64 * GIB)
    assert plan.context == DEFAULT_CONTEXT


def test_unasked_context_is_capped_by_the_model() -> None:
    config = tiny_config(max_context=512)
    assert plan_memory(config, {}, EngineOptions(), available_bytes=GIB).context == 512


def test_unasked_context_shrinks_to_what_fits() -> None:
    config = flash()
    room = plan_memory(
        config, {}, EngineOptions(), available_bytes=64 * GIB, context=1000
    ).needed_bytes
    plan = plan_memory(config, {}, EngineOptions(), available_bytes=room)
    assert plan.context == plan.largest_context >= 1000
    assert plan.fits


def test_limiting_item_is_where_the_budget_ends() -> None:
    weights = {"attention": GIB, "head": 2 * GIB}
    plan = plan_memory(flash(), weights, EngineOptions(), available_bytes=2 * GIB)
    assert not plan.fits
    assert plan.limiting_item == "head"
    assert plan.largest_context == 0


def test_long_context_is_limited_by_compressed_rows() -> None:
    options = EngineOptions(checkpoint_bytes=0)
    plan = plan_memory(flash(), {}, options, available_bytes=2 * GIB, context=1 << 20)
    assert plan.limiting_item == "compressed rows"


def test_experts_may_stay_on_disk() -> None:
    plan = plan_memory(
        flash(), {"routed experts": 100 * GIB}, EngineOptions(), available_bytes=4 * GIB
    )
    assert plan.fits
    assert not plan.experts_fit


def test_json_holds_items_and_verdict() -> None:
    plan = plan_memory(flash(), {"attention": 5}, EngineOptions(), available_bytes=GIB)
    found = json.loads(json.dumps(plan.to_json()))
    assert found["state_bytes_per_token"] == 3514.25
    assert found["needed_bytes"] == sum(i["bytes"] for i in found["items"] if i["required"])


@pytest.mark.parametrize(
    ("name", "item"),
    [
        ("embed.weight", "embedding"),
        ("token_embd.weight", "embedding"),
        ("head.weight", "head"),
        ("output.weight", "head"),
        ("norm.weight", "norms"),
        ("output_norm.weight", "norms"),
        ("hc_head_fn", "hyper-connections"),
        ("output_hc_fn.weight", "hyper-connections"),
        ("layers.3.hc_attn_base", "hyper-connections"),
        ("layers.3.attn_norm.weight", "norms"),
        ("blk.3.attn_norm.weight", "norms"),
        ("layers.3.attn.wq_a.weight", "attention"),
        ("layers.3.attn.attn_sink", "attention"),
        ("blk.3.attn_output_a.weight", "attention"),
        ("blk.3.attn_kv_a_norm.weight", "attention"),
        ("layers.3.attn.compressor.ape", "compressors"),
        ("blk.3.attn_compressor_kv.weight", "compressors"),
        ("layers.2.attn.indexer.compressor.wkv.weight", "indexers"),
        ("blk.2.indexer.attn_q_b.weight", "indexers"),
        ("blk.2.indexer_compressor_kv.weight", "indexers"),
        ("layers.3.ffn.gate.weight", "routers"),
        ("blk.3.ffn_gate_inp.weight", "routers"),
        ("blk.3.exp_probs_b.bias", "routers"),
        ("blk.0.ffn_gate_tid2eid.weight", "routers"),
        ("layers.3.ffn.experts.17.w1.scale", "routed experts"),
        ("blk.3.ffn_down_exps.weight", "routed experts"),
        ("layers.3.ffn.shared_experts.w2.weight", "shared experts"),
        ("blk.3.ffn_up_shexp.weight", "shared experts"),
        ("mtp.0.ffn.experts.0.w1.weight", "draft block"),
        ("blk.43.nextn.eh_proj.weight", "draft block"),
        ("rope_freqs", "other weights"),
    ],
)
def test_weights_are_sorted_by_role(name: str, item: str) -> None:
    assert weight_items([(name, 7)]) == {item: 7}
