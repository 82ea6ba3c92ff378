"""The memory plan keeps its budget for any shape."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tiny_model import tiny_config

from edgedsv4.config import EngineOptions, ModelConfig
from edgedsv4.runtime.memory_plan import MemoryPlan, StateLayout, plan_memory

CONFIGS = st.builds(
    lambda ratios, head, window, index, limit: tiny_config(
        compress_ratios=tuple(ratios),
        head_dim=head,
        window=window,
        index_dim=index,
        max_context=limit,
        num_hash_layers=0,
    ),
    st.lists(st.sampled_from([0, 4, 128]), min_size=1, max_size=8),
    st.sampled_from([32, 96, 512]),
    st.sampled_from([8, 128]),
    st.sampled_from([32, 128]),
    st.sampled_from([1, 100, 5000, 1 << 20]),
)
OPTIONS = st.builds(
    EngineOptions,
    profile=st.sampled_from(["exact", "default"]),
    dtype=st.sampled_from(["f32", "f64", "bf16"]),
    prefill_chunk=st.sampled_from([1, 64, 4096]),
    checkpoint_bytes=st.sampled_from([0, 1 << 16, 1 << 30]),
)
BUDGETS = st.integers(0, 1 << 34)


def planned(
    config: ModelConfig, options: EngineOptions, budget: int, context: int | None = None
) -> MemoryPlan:
    weights = {"attention": 1 << 20, "routed experts": 1 << 24}
    return plan_memory(config, weights, options, available_bytes=budget, context=context)


@given(CONFIGS, OPTIONS, BUDGETS)
def test_chosen_context_never_exceeds_the_budget_it_fits(
    config: ModelConfig, options: EngineOptions, budget: int
) -> None:
    plan = planned(config, options, budget)
    assert plan.fits == (plan.largest_context >= 1)
    assert 1 <= plan.context <= config.max_context


@given(CONFIGS, OPTIONS, st.integers(0, 1 << 30))
def test_largest_context_fits_and_the_next_does_not(
    config: ModelConfig, options: EngineOptions, spare: int
) -> None:
    budget = planned(config, options, 0, 1).needed_bytes + spare
    largest = planned(config, options, budget).largest_context
    assert planned(config, options, budget, largest).fits
    if largest < config.max_context:
        assert not planned(config, options, budget, largest + 1).fits


@given(CONFIGS, OPTIONS, BUDGETS)
def test_limiting_item_exists_exactly_when_it_does_not_fit(
    config: ModelConfig, options: EngineOptions, budget: int
) -> None:
    plan = planned(config, options, budget)
    assert (plan.limiting_item is None) == plan.fits


@given(CONFIGS, OPTIONS, st.integers(0, 4000))
def test_state_over_whole_windows_is_the_growth_per_token(
    config: ModelConfig, options: EngineOptions, windows: int
) -> None:
    layout = StateLayout(config, options.profile, options.dtype)
    context = 128 * windows
    grown = layout.state_bytes(context) - layout.state_bytes(0)
    assert grown == layout.bytes_per_token * context


@given(CONFIGS, OPTIONS, st.integers(1, 1 << 20))
def test_smaller_chunk_never_needs_more(
    config: ModelConfig, options: EngineOptions, context: int
) -> None:
    smaller = replace(options, prefill_chunk=1)
    assert (
        planned(config, smaller, 0, context).needed_bytes
        <= planned(config, options, 0, context).needed_bytes
    )
