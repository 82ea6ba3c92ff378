"""`python -m pocket.train --smoke`: does it train here, and how fast?

Times optimizer steps of every phase's shape, plain and compiled, with each way to run the experts;
checks that a step of phase A gives every weight a gradient and that all variants compute the same
loss. The batches are drawn at random, so no store is needed. Compiled code stays in the compiler's
cache, for the training that follows.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pocket.expert_probe import choose_expert_path
from pocket.network import Mode, Network
from pocket.objective import Meter, StepOptions, accumulate_gradients, move_selection_biases
from pocket.optimizer import Optimizer, parameters
from pocket.parameters import initial_weights
from pocket.pieces import CompileMode, Pieces
from pocket.schedule import PHASES, Phase, RateOptions, rates
from pocket.store import LOOK_AHEAD, TARGET_BIT, Batch, Position, TargetRule, make_batch
from pocket.tokenizer_build import hash_tables

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from pocket.train import TrainOptions
    from pocket.training_moe import ExpertPath

logger = logging.getLogger(__name__)

_DOCUMENT_TOKENS = 400


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    phase: str
    compile: CompileMode
    expert_path: ExpertPath


def smoke(options: TrainOptions) -> list[dict[str, Any]]:
    """Run every variant; the table goes to the log and to `smoke.json`.

    Args:
        options: device, configuration and steps per variant (default 20).
    """
    # These two need a module that imports this one's caller.
    from pocket.configs import named_config
    from pocket.train import _device

    device = _device(options.device)
    config = named_config(options.config_name)
    rows: list[dict[str, Any]] = []
    options.out.mkdir(parents=True, exist_ok=True)
    check_gradients(config, options, device)
    for variant in _variants(options, device):
        try:
            row = _time_variant(variant, config, options, device)
        except (RuntimeError, NotImplementedError) as error:
            logger.warning("%s failed", variant, exc_info=True)
            row = {**vars(variant), "error": str(error)[:200]}
        rows.append(row)
        text = json.dumps(rows, indent=1)
        (options.out / "smoke.json").write_text(text + "\n", encoding="utf-8")
        logger.info("%s", row)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for row in rows:
        logger.info(
            "%-2s %-5s %-8s %9s tokens/s  step %7s ms  first %6s s  peak %6s GB  loss %s",
            *(row.get(name, "-") for name in _COLUMNS),
        )
    return rows


_COLUMNS = (
    *("phase", "compile", "expert_path", "tokens_per_s", "step_ms"),
    *("first_s", "peak_gb", "loss"),
)


def _variants(options: TrainOptions, device: torch.device) -> list[Variant]:
    names = options.phases.split(",")
    chosen = choose_expert_path(options.expert_path, device)
    if device.type != "cuda":
        return [Variant(name, "off", chosen) for name in names]
    # The most important first: whoever runs this may not wait for the end.
    rows = [Variant(names[0], "auto", chosen), Variant(names[0], "off", chosen)]
    rows += [Variant(name, "auto", chosen) for name in names[1:]]
    return rows + ([Variant(names[0], "auto", "dense")] if chosen == "grouped" else [])


def random_batch(config: ModelConfig, shape: tuple[int, int], seed: int) -> Batch:
    """Random tokens in documents of some hundred."""
    draw = np.random.default_rng(seed)
    count = shape[0] * shape[1] + LOOK_AHEAD
    codes = draw.integers(3, config.vocab_size, count).astype(np.uint16)
    codes[::_DOCUMENT_TOKENS] = 0
    codes |= np.where(draw.random(count) < 0.7, TARGET_BIT, 0).astype(np.uint16)
    return make_batch(codes, shape, TargetRule(prompt_weight=0.1), Position())


def _fresh(
    config: ModelConfig, device: torch.device, mode: CompileMode
) -> tuple[Optimizer, Network]:
    counts = np.ones(config.vocab_size, dtype=np.int64)
    tables = hash_tables(
        counts, config.num_experts, config.experts_per_token, config.num_hash_layers
    )
    weights = initial_weights(config, 0, tables)
    optimizer = Optimizer(weights, config.output_groups, device)
    return optimizer, Network(config, optimizer.weights, Pieces(mode))


def _step_options(
    phase: Phase, variant: Variant, options: TrainOptions, device: torch.device
) -> StepOptions:
    is_gpu = device.type == "cuda"
    return StepOptions(
        mode=Mode(
            dtype=torch.bfloat16 if is_gpu else torch.float32,
            selection=phase.selection,
            is_quantised=phase.is_quantised,
            expert_path=variant.expert_path,
        ),
        rates=rates(RateOptions(), step=1000, warm_step=0, progress=phase.start + phase.width),
        micro_tokens=min(options.micro_tokens, 32768 if phase.length > 4096 else 1 << 30),
    )


def check_gradients(config: ModelConfig, options: TrainOptions, device: torch.device) -> list[str]:
    """Names of the weights that get no gradient in a step of phase A; none, if all is well."""
    optimizer, network = _fresh(config, device, "off")
    phase = PHASES[options.config_name]["A"]
    path = choose_expert_path(options.expert_path, device)
    step = _step_options(phase, Variant("A", "off", path), options, device)
    batch = random_batch(config, (2, phase.length), 7)
    accumulate_gradients(network, batch, step, _meter(config, device))
    silent = [
        name
        for name, weight in parameters(optimizer.weights)
        if weight.grad is None or not bool((weight.grad != 0).any())
    ]
    logger.info("gradient check: %s", f"none for {silent}" if silent else "every weight has one")
    return silent


def _meter(config: ModelConfig, device: torch.device) -> Meter:
    return Meter(config.num_layers + 1, config.num_experts, device)


def _time_variant(
    variant: Variant, config: ModelConfig, options: TrainOptions, device: torch.device
) -> dict[str, Any]:
    phase = PHASES[options.config_name][variant.phase]
    optimizer, network = _fresh(config, device, variant.compile)
    step_options = _step_options(phase, variant, options, device)
    meter = _meter(config, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    batches = [random_batch(config, phase.shape(), seed) for seed in range(2)]

    def step(number: int) -> None:
        batch = batches[number % 2]
        optimizer.zero_gradients()
        loads = accumulate_gradients(network, batch, step_options, meter)
        meter.norm += optimizer.step(1e-3)
        move_selection_biases(network, loads, 1e-3)

    begin = time.monotonic()
    step(0)
    loss = meter.read()["lm"]
    first = time.monotonic() - begin
    step(1)
    _wait(device)
    count = options.steps or 20
    begin = time.monotonic()
    for number in range(count):
        step(number)
    _wait(device)
    seconds = (time.monotonic() - begin) / count
    if device.type == "cuda" and variant == _variants(options, device)[0]:
        _profile(step, options.out)
    rows, length = phase.shape()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        **vars(variant),
        "tokens_per_s": round(rows * length / seconds),
        "step_ms": round(1000 * seconds, 1),
        "first_s": round(first, 1),
        "peak_gb": round(peak / 1e9, 1),
        "loss": round(loss, 4),
    }


def _profile(step: Callable[[int], None], out: Path) -> None:
    """Where the time of one step goes: the longest kernels, and the longest calls of the host."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        step(0)
        torch.cuda.synchronize()
    averages = profile.key_averages()
    tables = [
        averages.table(sort_by=key, row_limit=40, max_name_column_width=70)
        for key in ("self_cuda_time_total", "self_cpu_time_total")
    ]
    (out / "profile.txt").write_text("\n\n".join(tables), encoding="utf-8")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
