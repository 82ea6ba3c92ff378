"""What a measurement of a random network builds, runs and refuses; the forward is a stand-in."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_fakes import Machine, nvidia_card
from tiny_model import tiny_config

from edgedsv4.errors import BackendUnavailableError, CapacityError, ConfigError, DeviceLostError
from edgedsv4.model.gpu_cache import GpuKvCache
from edgedsv4.model.layer_plan import layer_plans
from edgedsv4.runtime import card_reads, synthetic_bench
from edgedsv4.runtime.gpu_devices import Gpu
from edgedsv4.runtime.kernel_profile import busy_seconds, kernel_times
from edgedsv4.runtime.memory_plan import StateLayout
from edgedsv4.runtime.synthetic_bench import (
    Hooks,
    SyntheticModel,
    SyntheticOptions,
    check_room,
    fill_with_noise,
    measure_network,
    measure_synthetic,
)
from edgedsv4.runtime.synthetic_network import synthetic_config

CONFIG = tiny_config(compress_ratios=(0, 4, 128))
OPTIONS = SyntheticOptions(
    experts="mxfp4", prompts=(3, 5), generate=2, depths=(0, 200), repeat=2, kernels=True
)
CARD = Gpu(
    device=torch.device("cpu"),
    kind="cuda",
    description="none",
    family="",
    shared_bytes=0,
    warp_size=32,
    multiprocessors=1,
    total_bytes=0,
    obstacle=None,
)


class StandIn:
    """A model that only moves its timeline on."""

    forwards: list[tuple[int, int]]

    def __init__(self, config: Any, _weights: Any, experts: Any, numerics: Any, **_: Any) -> None:
        self._config, self._numerics = config, numerics
        experts.check_unchanged()
        StandIn.forwards = []

    def new_cache(self, capacity: int) -> GpuKvCache:
        plans = layer_plans(self._config)
        return GpuKvCache(self._config, plans, capacity=capacity, numerics=self._numerics)

    def forward(self, token_ids: torch.Tensor, cache: GpuKvCache) -> SimpleNamespace:
        assert cache.length + len(token_ids) <= cache.capacity
        StandIn.forwards.append((cache.length, len(token_ids)))
        cache.length += len(token_ids)
        return SimpleNamespace(best=1)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic_bench, "GpuModel", StandIn)
    monkeypatch.setattr(card_reads.stream, "read_all", lambda _out, words: words.sum())


def test_every_depth_and_prompt_is_measured() -> None:
    seen: list[tuple[str, int, int]] = []
    report = measure_network(
        CONFIG, OPTIONS, CARD, Hooks(on_progress=lambda *step: seen.append(step))
    )
    found = [(r.work, r.depth, r.tokens, len(r.seconds)) for r in report.readings]
    assert found == [
        ("decode", 0, 2, 2),
        ("decode", 200, 2, 2),
        ("prefill", 0, 3, 2),
        ("prefill", 0, 5, 2),
    ]
    steps = ["reading memory", "random weights", "first token"]
    steps += ["decode at 0", "decode at 200", "prefill of 3", "prefill of 5"]
    assert seen == [(what, done, len(steps)) for done, what in enumerate(steps)]
    assert report.capture_seconds is not None
    assert report.model["layers"] == 3
    assert {"python", "torch", "triton"} < set(report.versions)
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["results"]


def test_first_token_and_capture_have_a_timeline_each() -> None:
    measure_network(CONFIG, OPTIONS, CARD)
    assert StandIn.forwards[:3] == [(0, 1), (0, 1), (0, 1)]
    assert (200, 1) in StandIn.forwards
    assert StandIn.forwards[-1] == (0, 5)


def test_without_decode_nothing_is_captured() -> None:
    options = SyntheticOptions(experts="mxfp4", prompts=(2,), generate=0, repeat=1)
    report = measure_network(CONFIG, options, CARD)
    assert (report.first_token_seconds, report.capture_seconds) == (None, None)
    assert [reading.work for reading in report.readings] == ["prefill"]


def test_timeline_is_full_of_finite_rows() -> None:
    cache = StandIn(CONFIG, None, synthetic_bench._NoFile(), _numerics()).new_cache(300)
    fill_with_noise(cache)
    for layer in cache.layers.values():
        rows = layer.window.parts
        assert not bool((rows[0] & 0x7F == 0x7F).any())
        for part in (layer.compressor, layer.indexer):
            if part is not None:
                assert bool(torch.isfinite(part.rows.read(0, 2)).all())


def _numerics() -> Any:
    return SyntheticModel(CONFIG, OPTIONS, CARD).model._numerics


def test_depths_end_with_the_context() -> None:
    config = synthetic_config("flash")
    depths = SyntheticOptions(generate=100).depths_in(config)
    assert depths == (0, 16_384, 65_536, 262_144, 1_048_576 - 100)
    assert SyntheticOptions(generate=100).capacity_in(config) == 1_048_576
    assert SyntheticOptions(generate=0).depths_in(config) == ()


def test_depths_and_prompts_beyond_the_context_are_refused() -> None:
    config = synthetic_config("flash")
    with pytest.raises(ConfigError, match=r"depths must be 0\.\.1,048,476"):
        SyntheticOptions(depths=(1_048_477,)).capacity_in(config)
    with pytest.raises(ConfigError, match="prompts"):
        SyntheticOptions(prompts=(1_048_577,)).capacity_in(config)


@pytest.mark.parametrize(
    "bad",
    [
        {"experts": "q3"},
        {"generate": -1},
        {"repeat": 0},
        {"prompts": (0,)},
        {"prompts": (), "generate": 0},
        {"depths": ()},
        {"depths": (-1,)},
        {"vram_bytes": 0},
    ],
    ids="-".join,
)
def test_options_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        SyntheticOptions(**bad)


@pytest.mark.parametrize("options", [{"name": "nano"}, {"layers": 44}, {"layers": 0}])
def test_networks_that_do_not_exist_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        measure_synthetic(SyntheticOptions(**options))


def test_without_a_gpu_there_is_nothing_to_measure() -> None:
    with pytest.raises(BackendUnavailableError, match="need a GPU"):
        measure_synthetic(SyntheticOptions(device="cpu"))


# ---- room ----

ROOM = SyntheticOptions(experts="mxfp4", depths=(0,), prompts=(512,))


def test_what_does_not_fit_says_how_many_layers_would() -> None:
    config = synthetic_config("flash")
    budget = 140 << 30
    with pytest.raises(CapacityError, match=r"take layers (\d+) \(--layers \1\)") as caught:
        check_room(config, ROOM, budget)
    assert caught.value.is_on_device
    assert caught.value.needed_bytes > caught.value.available_bytes == budget
    fitting = int(str(caught.value).split("--layers ")[1].split(")")[0])
    check_room(synthetic_config("flash", fitting), ROOM, budget)
    with pytest.raises(CapacityError):
        check_room(synthetic_config("flash", fitting + 1), ROOM, budget)


def test_what_fits_includes_the_timeline() -> None:
    config = synthetic_config("flash", 4)
    deep = SyntheticOptions(depths=(1_000_000,), prompts=(1,))
    shallow = SyntheticOptions(depths=(0,), prompts=(1,))
    with pytest.raises(CapacityError, match="not one layer") as caught:
        check_room(config, shallow, 1)
    least = caught.value.needed_bytes
    check_room(config, shallow, least)
    layout = StateLayout(config)
    grown = layout.state_bytes(1_000_100) - layout.state_bytes(100)
    assert grown > 0
    check_room(config, deep, least + grown)
    with pytest.raises(CapacityError):
        check_room(config, deep, least + grown - 1)


def test_card_is_looked_at_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.cuda(nvidia_card())
    with pytest.raises(CapacityError, match=r"flash with q2 experts and 43 layers .* layers \d+"):
        measure_synthetic(SyntheticOptions())
    with pytest.raises(CapacityError) as caught:
        measure_synthetic(SyntheticOptions(layers=2, vram_bytes=1 << 20))
    assert caught.value.available_bytes == 1 << 20


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.OutOfMemoryError("Tried to allocate 3.00 GiB"), CapacityError),
        (torch.AcceleratorError("gone"), DeviceLostError),
    ],
)
def test_failures_of_the_device_are_errors_of_the_library(
    monkeypatch: pytest.MonkeyPatch, raised: RuntimeError, expected: type[Exception]
) -> None:
    machine = Machine(monkeypatch)
    machine.cuda(nvidia_card())

    def fail(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(synthetic_bench, "measure_network", fail)
    with pytest.raises(expected, match="random network of the shape flash"):
        measure_synthetic(SyntheticOptions(layers=2, depths=(0,)))


def test_what_a_profiler_saw_is_per_step() -> None:
    events = [
        SimpleNamespace(key="a", count=10, self_device_time_total=50.0),
        SimpleNamespace(key="host only", count=10, self_device_time_total=0),
    ]
    (kernel,) = kernel_times(events, 5)
    assert (kernel.name, kernel.launches, kernel.seconds) == ("a", 2, pytest.approx(1e-5))


def test_a_device_is_busy_once_however_many_kernels_are_on_it() -> None:
    spans = [(30, 40), (0, 10), (5, 12), (6, 8), (12, 15), (100, 200)]
    events = [
        SimpleNamespace(
            time_range=SimpleNamespace(start=start, end=end), self_device_time_total=end - start
        )
        for start, end in spans
    ]
    events[-1].self_device_time_total = 0  # of the host
    assert busy_seconds(events, 5) == pytest.approx(25e-6 / 5)
    assert busy_seconds([], 5) == 0
