"""What is expected of a random network: of exactly the placement that is built."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from link_samples import CARD, expert_rate, links
from synthetic_samples import reading

from edgedsv4.errors import ConfigError
from edgedsv4.runtime import synthetic_prediction
from edgedsv4.runtime.synthetic_hybrid import HybridRecipe, chosen_experts
from edgedsv4.runtime.synthetic_network import EXPERT_TYPES, synthetic_config
from edgedsv4.runtime.synthetic_options import SyntheticOptions
from edgedsv4.runtime.synthetic_prediction import (
    Expectation,
    needed_links,
    synthetic_cost,
    synthetic_plan,
)

if TYPE_CHECKING:
    from edgedsv4.runtime.link_bench import LinkOptions
    from edgedsv4.runtime.links import Links


FLASH = synthetic_config("flash")
ROUTED = 3 * 4096 * 2048
OPTIONS = SyntheticOptions(cpu_experts="auto", vram_bytes=32 << 30, depths=(0, 5000), generate=60)
RATES = tuple(
    expert_rate(name, 8, tokens, 50e9) for name in ("IQ2_XXS", "Q2_K") for tokens in (1, 64)
)


def test_cost_of_a_token_is_that_of_the_network() -> None:
    found = synthetic_cost(FLASH, OPTIONS)
    assert found.expert_bytes == (7_077_888,) * 43
    assert found.expert_weights == ROUTED
    assert dict(found.block_types) == {
        "IQ2_XXS": 43 * 2 * 4096 * 2048,
        "Q2_K": 43 * 4096 * 2048,
    }
    assert 7.5e9 < found.dense_bytes < 7.8e9
    assert 6.0e9 < found.dense_weights < 7.5e9


def test_plan_has_the_experts_of_the_placement() -> None:
    recipe = HybridRecipe(EXPERT_TYPES["q2"], "auto", threads=1, room=20 << 30)
    chosen = chosen_experts(FLASH, recipe)
    plan = synthetic_plan(FLASH, OPTIONS, chosen)
    assert sum(plan.vram.slots) == chosen.resident
    assert sum(plan.ram.slots) == chosen.total - chosen.resident
    assert not any(plan.drive.slots)
    assert plan.vram.share == pytest.approx(chosen.resident / chosen.total)
    assert (plan.request.options.cpu_experts, plan.chunk) == ("auto", 4096)


def test_without_cpu_experts_all_are_on_the_card() -> None:
    plan = synthetic_plan(FLASH, dataclasses.replace(OPTIONS, cpu_experts=None), None)
    assert plan.vram.slots == (256,) * 43


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_every_reading_has_its_expectation(mode: str) -> None:
    options = dataclasses.replace(OPTIONS, cpu_experts=mode, prompts=(8, 512))  # type: ignore[arg-type]
    recipe = HybridRecipe(EXPERT_TYPES["q2"], options.cpu_experts or "auto", 1, 20 << 30)
    plan = synthetic_plan(FLASH, options, chosen_experts(FLASH, recipe))
    found = Expectation.of(plan, options, links(experts=RATES))
    assert [depth for depth, _ in found.decode] == [0, 5000]
    assert [prefill.tokens for prefill in found.prefill.prefill] == [8, 512]
    near, far = (prediction.decode.tokens_per_second for _, prediction in found.decode)
    assert near > far
    deviation = found.deviation(reading("decode", depth=5000, seconds=(2.0, 2.0)))
    assert deviation is not None
    assert (deviation.predicted, deviation.found) == (far, 0.5)
    short = found.deviation(reading("prefill", tokens=8, seconds=(4.0,)))
    assert short is not None
    assert short.predicted == found.prefill.prefill[0].tokens_per_second
    assert found.deviation(reading("decode", depth=7)) is None


def test_figures_that_are_missing_are_named() -> None:
    plan = synthetic_plan(FLASH, dataclasses.replace(OPTIONS, cpu_experts=None), None)
    with pytest.raises(ConfigError, match="bench links --types IQ2_XXS,Q2_K"):
        Expectation.of(plan, OPTIONS, links(card=dataclasses.replace(CARD, to_card=())))


def test_only_what_is_needed_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[LinkOptions] = []

    def measure(options: LinkOptions, on_progress: object) -> Links:
        assert on_progress is print
        asked.append(options)
        return links()

    monkeypatch.setattr(synthetic_prediction, "measure_links", measure)
    needed_links(FLASH, dataclasses.replace(OPTIONS, expert_threads=5, device="cuda:1"), print)
    (options,) = asked
    assert options.types == ("IQ2_XXS", "Q2_K")
    assert (options.threads, options.device, options.is_thorough) == (5, "cuda:1", False)
    assert options.path is None
    assert not torch.cuda.is_initialized()
