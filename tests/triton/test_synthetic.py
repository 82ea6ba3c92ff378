"""A random network runs: a tiny one by the interpreter, measured layers of Flash on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from gpu_models import SMALL_SHAPE
from tiny_model import tiny_config
from triton_device import DEVICE

from edgedsv4.kernels._triton import IS_INTERPRETED
from edgedsv4.runtime import synthetic_bench
from edgedsv4.runtime.gpu_devices import Gpu, gpu_of
from edgedsv4.runtime.synthetic_bench import (
    SyntheticModel,
    SyntheticOptions,
    measure_synthetic,
)

if TYPE_CHECKING:
    from edgedsv4.runtime.synthetic_hybrid import HybridRecipe

pytestmark = pytest.mark.usefixtures("few_programs")
CONFIG = tiny_config(
    compress_ratios=(4,),
    num_hash_layers=0,
    **SMALL_SHAPE,
)
OPTIONS = SyntheticOptions(experts="mxfp4", prompts=(), generate=1, depths=(60,))


def card() -> Gpu:
    if DEVICE != "cpu":
        return gpu_of(torch.device(DEVICE, 0))
    return Gpu(
        device=torch.device("cpu"),
        kind="cuda",
        description="interpreter",
        family="",
        shared_bytes=0,
        warp_size=32,
        multiprocessors=1,
        total_bytes=0,
        obstacle=None,
    )


def test_noise_at_a_depth_gives_a_token() -> None:
    made = SyntheticModel(CONFIG, OPTIONS, card())
    assert made.network.layers[0].indexer is not None
    made.go_to(60)  # more rows than are selected
    forward = made.model.forward(torch.tensor([1]), made.cache)
    assert forward.logits is not None
    assert bool(torch.isfinite(forward.logits).all())
    assert made.cache.length == 61


@pytest.mark.skipif(IS_INTERPRETED, reason="needs a GPU")
def test_flash_layers_are_measured_and_explained() -> None:
    options = SyntheticOptions(layers=4, prompts=(256,), generate=20, depths=(4096,), kernels=True)
    report = measure_synthetic(options)
    assert not report.problems()
    assert report.capture_seconds is not None
    assert report.capture_seconds < 2
    decode, prefill = report.readings
    assert not decode.unseen
    assert not prefill.unseen
    explained = sum(k.seconds for k in decode.kernels if k.traffic is not None)
    assert explained > 0.9 * decode.kernel_seconds
    assert 0 < decode.busy_seconds <= decode.kernel_seconds
    assert decode.busy_seconds < 1.2 * decode.median_seconds


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_experts_in_main_memory_give_a_token(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = synthetic_bench._hybrid_recipe

    def small(*given: Any) -> HybridRecipe:
        """Room for few of the experts, whatever else is on a card."""
        return replace(whole(*given), room=80 << 10)

    monkeypatch.setattr(synthetic_bench, "_hybrid_recipe", small)
    options = replace(OPTIONS, cpu_experts=mode, expert_threads=2)
    made = SyntheticModel(CONFIG, options, card())
    hybrid = made.network.hybrid
    assert hybrid is not None
    assert hybrid.host is not None
    made.go_to(60)
    before = hybrid.host.counts().calls
    forward = made.model.forward(torch.tensor([1]), made.cache)
    assert forward.logits is not None
    assert bool(torch.isfinite(forward.logits).all())
    assert hybrid.host.counts().calls > before
    made.close()


@pytest.mark.skipif(IS_INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_flash_layers_run_beside_the_cpu(mode: str) -> None:
    options = SyntheticOptions(
        layers=4, prompts=(8, 512), generate=20, depths=(0,), cpu_experts=mode, vram_bytes=8 << 30
    )
    report = measure_synthetic(options)
    decode = report.readings[0]
    assert not report.problems()
    share = report.host_share(decode)
    if mode == "on":
        assert decode.host is not None
        assert decode.host.experts == 4 * 6
        assert share is not None
        assert 0.05 < share < 1.1
