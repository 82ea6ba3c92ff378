"""Training runs: resumed, cut, carried in shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from pocket import configs, schedule
from pocket.checkpoint import SHARD_BYTES, load_state, read_shards, write_shards
from pocket.expert_probe import grouped_error
from pocket.parameters import initial_weights
from pocket.schedule import Phase, RateOptions, phases_of, rates
from pocket.store import TARGET_BIT
from pocket.train import Trainer, TrainOptions, main
from tiny_model import tiny_config

from edgedsv4.errors import ConfigError

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig

CPU = torch.device("cpu")
NAME = "tiny"


def small_config() -> ModelConfig:
    return tiny_config(
        num_draft_layers=1,
        compress_ratios=(0, 4),
        num_hash_layers=1,
        hidden_size=64,
        index_heads=4,
        num_experts=4,
        experts_per_token=2,
        hc_sinkhorn_iterations=3,
    )


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration and phases that take milliseconds."""
    phases = schedule._phases((64, 128, 128, 64, 128), 128)
    monkeypatch.setattr(configs, "CONFIGS", {NAME: small_config})
    monkeypatch.setattr("pocket.train.CONFIGS", {NAME: small_config})
    monkeypatch.setattr(schedule, "PHASES", {NAME: phases})


@pytest.fixture
def stores(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for phase in "ABCD":
        directory = tmp_path / f"store-{phase}"
        directory.mkdir()
        codes = np.tile(draw.integers(3, 40, 37), 30).astype("<u2") | TARGET_BIT
        codes[::200] = 0
        codes.tofile(directory / "part-00000.bin")
        (directory / "DONE").touch()
    return tmp_path


def options(stores: Path, out: str, **changes: Any) -> TrainOptions:
    wanted = {"phases": "A", "steps": 6, "rates": RateOptions(warmup_steps=2), **changes}
    return TrainOptions(config_name=NAME, store_dir=stores, out=stores / out, **wanted)


def run(chosen: TrainOptions) -> Trainer:
    trainer = Trainer(chosen)
    trainer.run()
    return trainer


def log_lines(trainer: Trainer) -> list[dict[str, Any]]:
    text = (trainer.options.out / "train_log.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_resumed_run_is_bit_for_bit_the_uninterrupted_one(stores: Path) -> None:
    whole = run(options(stores, "whole", phases="A,D"))
    run(options(stores, "cut", phases="A,D", stop_after=8))
    resumed = run(options(stores, "cut", phases="A,D", resume=stores / "cut"))
    assert torch.equal(whole.optimizer.flat, resumed.optimizer.flat)
    assert whole.progress == resumed.progress
    assert all(
        torch.equal(value, resumed.network.weights[name])
        for name, value in whole.network.weights.items()
    )


def test_loss_falls(stores: Path) -> None:
    trainer = run(options(stores, "out", steps=40, log_steps=10))
    lines = log_lines(trainer)
    assert lines[-1]["lm"] < lines[0]["lm"] - 0.5


def test_log_has_a_line_per_interval_with_every_part(stores: Path) -> None:
    lines = log_lines(run(options(stores, "out", log_steps=2)))
    assert [line["step"] for line in lines] == [2, 4, 6]
    wanted = {"lm", "mtp1", "kl", "load", "lr", "grad_norm", "tokens", "tokens_per_s", "skipped"}
    assert wanted <= lines[0].keys()
    assert len(lines[0]["load"]) == small_config().num_layers + 1


def test_finished_phase_is_not_trained_again(stores: Path) -> None:
    run(options(stores, "out"))
    resumed = run(options(stores, "out", phases="A,B", resume=stores / "out"))
    assert resumed.progress.phase == "B"
    assert resumed.progress.step == 12


def test_run_from_shards_warms_up_again(stores: Path) -> None:
    first = run(options(stores, "out", shards=stores / "shards"))
    resumed = Trainer(options(stores, "again", phases="B", resume=stores / "shards"))
    assert resumed.progress.step == first.progress.step
    assert resumed.progress.warm_step == 0
    assert not resumed.optimizer.state()["momentum"].any()
    for name, weight in first.network.weights.items():
        assert torch.equal(weight.bfloat16().float(), resumed.network.weights[name].bfloat16())


def test_schedule_starts_anew_from_shards_when_asked(stores: Path) -> None:
    first = run(options(stores, "out", shards=stores / "shards"))
    resumed = run(options(stores, "again", resume=stores / "shards", again=True))
    assert (resumed.progress.phase, resumed.progress.step) == ("A", 2 * first.progress.step)


def test_run_within_a_time_ends_and_leaves_its_state(stores: Path) -> None:
    trainer = run(options(stores, "out", steps=None, until=4.0, phases="A,B,C,D"))
    assert trainer.progress.phase == "D"
    assert load_state(stores / "out", CPU) is not None


def test_run_without_data_still_saves_in_time(stores: Path) -> None:
    run(options(stores, "out", steps=2))
    (stores / "store-B" / "DONE").unlink()
    (stores / "store-B" / "part-00000.bin").unlink()
    changes = {"steps": None, "until": 3.0, "resume": stores / "out"}
    trainer = run(options(stores, "again", phases="B", **changes))
    assert trainer.progress.step == 2
    assert load_state(stores / "again", CPU) is not None


def test_step_with_a_damaged_gradient_is_skipped(stores: Path) -> None:
    trainer = Trainer(options(stores, "out", log_steps=1))
    with torch.no_grad():
        trainer.network.weights["head.weight"][5, 5] = torch.nan
    before = trainer.network.weights["layers.0.attn.wq_a.weight"].detach().clone()
    trainer.run()
    assert log_lines(trainer)[-1]["skipped"] == 6
    assert torch.equal(trainer.network.weights["layers.0.attn.wq_a.weight"].detach(), before)


def test_selection_biases_follow_the_load(stores: Path) -> None:
    trainer = run(options(stores, "out", steps=4))
    bias = trainer.network.weights["layers.1.ffn.gate.bias"]
    assert bias.abs().max() <= 4 * 1e-2 + 1e-6
    assert bias.any()


def test_time_or_steps_must_be_given(stores: Path) -> None:
    with pytest.raises(ConfigError, match="--until"):
        run(options(stores, "out", steps=None))


def test_command_reports_a_missing_resume_directory(stores: Path) -> None:
    arguments = ["--config", NAME, "--store-dir", str(stores), "--out", str(stores / "out")]
    assert main([*arguments, "--steps", "1", "--resume", str(stores / "nothing")]) == 2


def test_shards_are_small_enough_to_carry(tmp_path: Path) -> None:
    config = configs.pocket_v4()
    tables = [np.zeros((config.vocab_size, 2), dtype=np.int64)] * config.num_hash_layers
    weights = initial_weights(config, 0, tables)
    paths = write_shards(tmp_path, weights, {"step": "7"})
    assert 3 <= len(paths) <= 4
    assert max(path.stat().st_size for path in paths) < SHARD_BYTES
    back, notes = read_shards(tmp_path, config)
    assert notes["step"] == "7"
    assert torch.equal(back["head.weight"], weights["head.weight"].bfloat16().float())
    assert sum(w.numel() for n, w in back.items() if "tid2eid" not in n) == pytest.approx(
        23.0e6, rel=0.01
    )


def test_grouped_experts_agree_with_dense_ones() -> None:
    assert grouped_error(CPU, torch.float32) < 1e-5


@pytest.fixture
def phases() -> Iterator[list[Phase]]:
    return phases_of(NAME, "D,A")


def test_phases_come_in_the_order_of_the_run(phases: list[Phase]) -> None:
    assert [phase.name for phase in phases] == ["A", "D"]


def test_last_phase_has_long_sequences_where_the_store_has_them(phases: list[Phase]) -> None:
    assert phases[1].shape(False) == (2, 64)
    assert phases[1].shape(True) == (1, 128)
    assert phases[0].shape(True) == phases[0].shape(False)


def test_rates_warm_up_hold_and_fall() -> None:
    def rate(warm_step: int, progress: float) -> float:
        now = rates(RateOptions(), step=warm_step, warm_step=warm_step, progress=progress)
        return now.learning

    assert rate(0, 0.0) == pytest.approx(1e-5)
    assert rate(500, 0.5) == pytest.approx(2e-3)
    assert rate(500, 0.75) == pytest.approx(2e-3)
    assert rate(500, 0.875) == pytest.approx(1e-3)
    assert rate(500, 1.0) == 0


def test_second_draft_step_and_frozen_biases_come_at_the_end() -> None:
    late = rates(RateOptions(), step=9000, warm_step=9000, progress=0.95)
    early = rates(RateOptions(), step=100, warm_step=100, progress=0.1)
    assert (late.draft_steps, late.selection_bias, late.draft) == (2, 0.0, 0.1)
    assert (early.draft_steps, early.selection_bias, early.draft) == (1, 1e-2, 0.3)
