"""What the layer plan decides."""

from __future__ import annotations

from tiny_model import tiny_config

from edgedsv4.model.layer_plan import draft_plan, layer_plans

CONFIG = tiny_config(compress_ratios=(0, 4, 128, 4), num_hash_layers=2)
PLANS = layer_plans(CONFIG)


def test_ratio_four_overlaps_and_is_indexed() -> None:
    assert [plan.has_overlap for plan in PLANS] == [False, True, False, True]
    assert [plan.index_source for plan in PLANS] == [None, 1, None, 3]


def test_every_compressed_layer_reads_its_own_rows() -> None:
    assert [plan.kv_source for plan in PLANS] == [None, 1, 2, 3]


def test_only_layers_with_compression_use_the_scaled_rotation() -> None:
    assert [plan.rope.scaling is None for plan in PLANS] == [True, False, False, False]
    assert [plan.rope.theta for plan in PLANS] == [10000.0, 160000.0, 160000.0, 160000.0]


def test_the_first_layers_are_hash_routed() -> None:
    assert [plan.is_hash_routed for plan in PLANS] == [True, True, False, False]


def test_the_draft_block_is_window_only_and_not_hash_routed() -> None:
    plan = draft_plan(CONFIG)
    assert (plan.layer, plan.ratio, plan.kv_source, plan.is_hash_routed) == (4, 0, None, False)
    assert plan.rope.scaling is None


def test_a_row_is_visible_to_the_token_that_completes_it() -> None:
    assert [PLANS[1].visible_rows(n) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_raw_projections_reach_back_to_the_windows_that_can_still_be_pooled() -> None:
    assert [PLANS[1].first_raw_position(t) for t in (0, 3, 4, 7, 8, 13)] == [0, 0, 0, 0, 4, 8]
    assert [PLANS[2].first_raw_position(t) for t in (0, 127, 128, 300)] == [0, 0, 128, 256]
