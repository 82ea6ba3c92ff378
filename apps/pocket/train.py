"""`python -m pocket.train`: trains a pocket model unattended within a wall-clock limit.

A run is a list of phases (`schedule`). It can be cut anywhere: the state is saved every two minutes
and at the end, and a run resumed from it goes on with the same data, weights and optimizer. When
the machine is lost, a run resumes from shards with a fresh optimizer and a warm-up.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from edgedsv4.errors import ConfigError, Dsv4Error
from pocket.checkpoint import load_state, read_shards, save_state, write_shards
from pocket.configs import CONFIGS, named_config
from pocket.expert_probe import choose_expert_path
from pocket.network import Mode, Network
from pocket.objective import (
    Meter,
    StepOptions,
    accumulate_gradients,
    move_selection_biases,
)
from pocket.optimizer import Optimizer
from pocket.parameters import initial_weights
from pocket.pieces import CompileMode, Pieces
from pocket.schedule import Clock, Phase, RateOptions, Rates, phases_of, rates
from pocket.store import Batch, BatchLoader, Position, TargetRule, token_counts
from pocket.tokenizer_build import hash_tables

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from pocket.training_moe import ExpertPath

logger = logging.getLogger(__name__)

LOG_STEPS: Final = 50
SAVE_SECONDS: Final = 120.0


@dataclass(kw_only=True)
class TrainOptions:
    """What the command line asks for."""

    config_name: str
    store_dir: Path
    """Holds `store-A` and so on."""
    out: Path
    """Gets `state.pt` and `train_log.jsonl`."""
    phases: str = "A,B,C,D"
    until: float | None = None
    """Seconds until the process must be done, saving included."""
    whole: float | None = None
    """Seconds that the whole run shall train, in however many processes; None shares out what this
    process has among its phases."""
    steps: int | None = None
    """Steps of each phase, in place of a time."""
    stop_after: int | None = None
    """Stop after so many steps of this process, as if killed after saving."""
    resume: Path | None = None
    again: bool = False
    """Start the schedule anew from the shards' weights."""
    shards: Path | None = None
    seed: int = 1
    device: str = "auto"
    compile: CompileMode = "auto"
    expert_path: str = "auto"
    micro_tokens: int = 65536
    """Tokens of one forward and backward pass."""
    has_document_mask: bool = True
    log_steps: int = LOG_STEPS
    rates: RateOptions = field(default_factory=RateOptions)


@dataclass
class Progress:
    """How far a run is; everything but the tensors."""

    step: int = 0
    """Optimizer steps of the run."""
    warm_step: int = 0
    """Of these since the optimizer was fresh."""
    tokens: int = 0
    phase: str = ""
    phase_step: int = 0
    fraction: float = 0.0
    """Of the phase."""
    positions: dict[str, dict[str, int]] = field(default_factory=dict)
    """Phase -> position in its store."""


class Trainer:
    """One run on one device."""

    def __init__(self, options: TrainOptions) -> None:
        self.options = options
        self.config: ModelConfig = named_config(options.config_name)
        self.device = _device(options.device)
        self.progress = Progress()
        self._begin = time.monotonic()
        self._deadline = None if options.until is None else self._begin + options.until
        weights, state = self._start_weights()
        self.optimizer = Optimizer(weights, self.config.output_groups, self.device)
        if state is not None:
            self.optimizer.load_state(state["optimizer"])
            self.progress = Progress(**state["progress"])
            torch.set_rng_state(state["rng"].cpu())
        mode: CompileMode = options.compile if self.device.type == "cuda" else "off"
        self.network = Network(self.config, self.optimizer.weights, Pieces(mode))
        self.expert_path: ExpertPath = choose_expert_path(options.expert_path, self.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        layers = self.config.num_layers + 1
        self.meter = Meter(layers, self.config.num_experts, self.device)
        self.micro_tokens = options.micro_tokens
        self.query_block: int | None = None
        self._own_steps = 0
        self._saved = self._logged = time.monotonic()
        self._logged_tokens = self.progress.tokens

    # ---- start and end

    def _start_weights(self) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        """Weights to begin with, and the state to load over them."""
        resume = self.options.resume
        state = None if resume is None else load_state(resume, self.device)
        if resume is not None and state is None:
            weights, notes = read_shards(resume, self.config)
            self.progress = Progress(
                step=int(notes.get("step", "0")), tokens=int(notes.get("tokens", "0"))
            )
            if not self.options.again:
                self.progress.phase = notes.get("phase", "")
                self.progress.fraction = float(notes.get("fraction", "0"))
            return weights, None
        if state is not None:
            shape = (self.config.num_hash_layers, self.config.vocab_size)
            tables = np.zeros((*shape, self.config.experts_per_token), dtype=np.int32)
            return initial_weights(self.config, 0, tables), state
        first = phases_of(self.options.config_name, self.options.phases)[0]
        counts = token_counts(self._store(first), self.config.vocab_size)
        shape = (self.config.num_experts, self.config.experts_per_token)
        tables = hash_tables(counts, *shape, self.config.num_hash_layers, seed=self.options.seed)
        return initial_weights(self.config, self.options.seed, tables), None

    def _store(self, phase: Phase) -> Path:
        return self.options.store_dir / f"store-{phase.name}"

    def save(self) -> None:
        """Write the state, and the shards if they are asked for."""
        save_state(
            self.options.out,
            {
                "optimizer": self.optimizer.state(),
                "progress": asdict(self.progress),
                "rng": torch.get_rng_state(),
                "config": self.options.config_name,
            },
        )
        self._saved = time.monotonic()

    def write_shards(self) -> None:
        """Write the shards, if they are asked for."""
        if self.options.shards is None:
            return
        progress = self.progress
        notes = {
            "config": self.options.config_name,
            "step": str(progress.step),
            "tokens": str(progress.tokens),
            "phase": progress.phase,
            "fraction": str(progress.fraction),
        }
        paths = write_shards(self.options.shards, self.network.weights, notes)
        logger.info("wrote %d shards to %s", len(paths), self.options.shards)

    # ---- the run

    def run(self) -> None:
        """Train the phases that are left, then save."""
        phases = phases_of(self.options.config_name, self.options.phases)
        names = [phase.name for phase in phases]
        if self.progress.phase in names and self.progress.fraction < 1:
            phases = phases[names.index(self.progress.phase) :]
        elif self.progress.phase in names:
            phases = phases[names.index(self.progress.phase) + 1 :]
        for index, phase in enumerate(phases):
            if not self._train_phase(phase, phases[index:]):
                break
        self.log(force=True)
        self.save()
        self.write_shards()

    def _enter(self, phase: Phase) -> float:
        """Prepare the progress for a phase; the fraction of it that is already done."""
        if self.progress.phase != phase.name or self.progress.fraction >= 1:
            self.progress = replace(self.progress, phase=phase.name, phase_step=0, fraction=0.0)
        logger.info("phase %s from %.0f %%", phase.name, 100 * self.progress.fraction)
        return self.progress.fraction

    def _clock(self, left: Sequence[Phase], done: float) -> Clock:
        """The time left, shared out by the widths of the phases left."""
        if self.options.steps is not None:
            return Clock(steps=self.options.steps)
        mine = left[0].width * (1 - done)
        if self.options.whole is not None:
            return Clock(seconds=self.options.whole * mine)
        share = mine / (mine + sum(phase.width for phase in left[1:]))
        return Clock(seconds=self._seconds_left() * share)

    def _seconds_left(self) -> float:
        """Until training must stop, so that there is time to save."""
        if self._deadline is None:
            raise ConfigError("train needs --until or --steps")
        reserve = 8.0 if self.device.type == "cuda" else 1.0
        return self._deadline - time.monotonic() - reserve

    def _train_phase(self, phase: Phase, left: Sequence[Phase]) -> bool:
        """Train until the phase's time is over; False if the run was stopped before."""
        done = self._enter(phase)
        clock = self._clock(left, done)
        loader = self._loader(phase)

        def is_over() -> bool:
            self.progress.fraction = self._fraction(clock, done)
            return self.progress.fraction >= 1 or self._is_cut()

        try:
            for batch in loader.batches(is_over):
                if is_over():
                    break
                self._guarded_step(batch, phase, self.progress.fraction)
        finally:
            loader.close()
        return self.progress.fraction >= 1 and not self._is_cut()

    def _is_cut(self) -> bool:
        """Whether this process must stop, wherever the run is."""
        if self.options.stop_after is not None and self._own_steps >= self.options.stop_after:
            return True
        return self.options.steps is None and self._seconds_left() <= 0

    def _fraction(self, clock: Clock, done: float) -> float:
        if self.options.steps is not None:
            return clock.fraction(self.progress.phase_step)
        return done + (1 - done) * clock.fraction(self.progress.phase_step)

    def _loader(self, phase: Phase) -> BatchLoader:
        position = self.progress.positions.get(phase.name)
        return BatchLoader(
            self._store(phase),
            Position(**position) if position else Position(),
            phase.shape,
            TargetRule(prompt_weight=phase.prompt_weight),
            is_pinned=self.device.type == "cuda",
        )

    def _guarded_step(self, batch: Batch, phase: Phase, fraction: float) -> None:
        """One step; with less memory at a time, or uncompiled, if it does not work otherwise."""
        while True:
            try:
                self._step(batch, phase, fraction)
                return
            except torch.cuda.OutOfMemoryError:
                self._use_less_memory(batch.length)
            except Exception:
                # Only the first step of a shape compiles; later errors are not the compiler's.
                if self.network.pieces.mode == "off" or self.progress.phase_step > 4:
                    raise
                logger.warning("training goes on uncompiled", exc_info=True)
                self.network.pieces = Pieces("off")

    def _use_less_memory(self, length: int) -> None:
        torch.cuda.empty_cache()
        if self.micro_tokens > length:
            self.micro_tokens = max(length, min(self.micro_tokens, 65536) // 2)
        elif self.query_block is None or self.query_block > 1024:
            self.query_block = 4096 if self.query_block is None else self.query_block // 2
        else:
            raise ConfigError(f"one sequence of {length} tokens does not fit this device")
        logger.warning(
            "out of memory: %d tokens at a time, query block %s",
            self.micro_tokens,
            self.query_block,
        )

    def _step(self, batch: Batch, phase: Phase, fraction: float) -> None:
        progress = self.progress
        now = rates(
            self.options.rates,
            step=progress.step,
            warm_step=progress.warm_step,
            progress=phase.start + phase.width * fraction,
        )
        self.optimizer.zero_gradients()
        options = StepOptions(
            mode=self.mode(phase),
            rates=now,
            # The scores of one long sequence alone fill some gigabytes.
            micro_tokens=min(self.micro_tokens, 32768)
            if batch.length > 4096
            else self.micro_tokens,
            has_document_mask=self.options.has_document_mask,
        )
        loads = accumulate_gradients(self.network, batch, options, self.meter)
        self.meter.norm += self.optimizer.step(now.learning)
        move_selection_biases(self.network, loads, now.selection_bias)
        self._count(batch, now)

    def mode(self, phase: Phase) -> Mode:
        """How a phase's forward runs."""
        return Mode(
            dtype=self.dtype,
            selection=phase.selection,
            is_quantised=phase.is_quantised,
            expert_path=self.expert_path,
            query_block=self.query_block,
        )

    def _count(self, batch: Batch, now: Rates) -> None:
        progress = self.progress
        progress.step += 1
        progress.warm_step += 1
        progress.phase_step += 1
        self._own_steps += 1
        progress.tokens += batch.weights[0].numel()
        progress.positions[progress.phase] = asdict(batch.position)
        if progress.step % self.options.log_steps == 0:
            self.log(now)
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()

    def log(self, now: Rates | None = None, *, force: bool = False) -> None:
        """Append a line to `train_log.jsonl`; waits for the device."""
        if not self.meter.steps or (now is None and not force):
            return
        means = self.meter.read()
        norm = self.meter.norm.item() / self.meter.steps
        moment = time.monotonic()
        tokens = self.progress.tokens - self._logged_tokens
        line = {
            "step": self.progress.step,
            "phase": self.progress.phase,
            "fraction": round(self.progress.fraction, 4),
            "tokens": self.progress.tokens,
            "seconds": round(moment - self._begin, 1),
            "tokens_per_s": round(tokens / max(1e-6, moment - self._logged)),
            **{name: round(value, 5) for name, value in means.items()},
            "load": self.meter.load_ratios(),
            "lr": None if now is None else round(now.learning, 7),
            "grad_norm": round(norm, 4),
            "skipped": int(self.optimizer.skipped.item()),
            "store": self.progress.positions.get(self.progress.phase),
        }
        self.options.out.mkdir(parents=True, exist_ok=True)
        with (self.options.out / "train_log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        logger.info(
            "%(phase)s step %(step)d: lm %(lm).4f mtp %(mtp1).4f kl %(kl).4f, norm %(grad_norm).3f,"
            " %(tokens_per_s)d tokens/s",
            line,
        )
        self.meter.reset()
        self._logged, self._logged_tokens = moment, self.progress.tokens


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        # TF32 in the few float32 products (head, mixes, router): 11 bits, eight times the speed.
        torch.set_float32_matmul_precision("high")
    return device


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pocket.train", description=__doc__)
    add: Callable[..., Any] = parser.add_argument
    add("--config", choices=list(CONFIGS), default="pocket-v4")
    add("--store-dir", type=Path, required=True, help="directory of store-A, store-B, ...")
    add("--phase", default="A,B,C,D", help="phases to train, comma separated")
    add("--until", type=float, help="seconds until this process must be done")
    add("--whole", type=float, help="seconds that the whole run shall train, over all processes")
    add("--steps", type=int, help="steps of each phase, in place of --until")
    add("--stop-after", type=int, help="stop after so many steps, to be resumed")
    add("--out", type=Path, required=True, help="for state.pt and train_log.jsonl")
    add("--resume", type=Path, help="directory of a state.pt, or of shards")
    add("--again", action="store_true", help="with shards: start the schedule anew from them")
    add("--shards", type=Path, help="write bfloat16 shards there at the end")
    add("--seed", type=int, default=1)
    add("--device", default="auto")
    add("--compile", choices=["auto", "off"], default="auto")
    add("--experts", choices=["auto", "grouped", "dense", "loop"], default="auto")
    add("--micro-tokens", type=int, default=65536)
    add("--no-document-mask", action="store_true")
    add("--log-steps", type=int, default=LOG_STEPS)
    add("--lr", type=float, default=RateOptions.peak)
    add("--warmup", type=int, default=RateOptions.warmup_steps)
    add("--decay-from", type=float, default=RateOptions.decay_from)
    add("--smoke", action="store_true", help="time variants, check gradients, train nothing")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    args = _parser().parse_args(arguments)
    options = TrainOptions(
        config_name=args.config,
        store_dir=args.store_dir,
        out=args.out,
        phases=args.phase,
        until=args.until,
        whole=args.whole,
        steps=args.steps,
        stop_after=args.stop_after,
        resume=args.resume,
        again=args.again,
        shards=args.shards,
        seed=args.seed,
        device=args.device,
        compile=args.compile,
        expert_path=args.experts,
        micro_tokens=args.micro_tokens,
        has_document_mask=not args.no_document_mask,
        log_steps=args.log_steps,
        rates=RateOptions(peak=args.lr, warmup_steps=args.warmup, decay_from=args.decay_from),
    )
    try:
        if args.smoke:
            # The smoke test needs a trainer; a trainer does not need it.
            from pocket.smoke import smoke

            smoke(options)
        else:
            Trainer(options).run()
    except Dsv4Error as error:
        logger.error("%s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
