"""Weights between two runs: which move, how far, and what the command leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from pocket.average import between, main
from pocket.checkpoint import read_shards, write_shards
from pocket.configs import named_config
from pocket.parameters import initial_weights

from edgedsv4.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

CI = named_config("ci-v4")
EXPERT, DRAFT_EXPERT, ROUTER = (
    "layers.0.ffn.experts.w1", "mtp.0.ffn.experts.w1", "layers.1.ffn.gate.weight",
)  # fmt: skip


def weights_of(value: float) -> dict[str, Tensor]:
    return {name: torch.full((2, 3), value) for name in (EXPERT, DRAFT_EXPERT, ROUTER)}


def test_experts_of_the_trunk_lie_between() -> None:
    found = between(weights_of(1.0), weights_of(2.0), 0.75)
    assert torch.equal(found[EXPERT], torch.full((2, 3), 1.75))


@pytest.mark.parametrize("name", [DRAFT_EXPERT, ROUTER])
def test_all_else_is_the_later_runs(name: str) -> None:
    assert torch.equal(between(weights_of(1.0), weights_of(2.0), 0.75)[name], weights_of(2.0)[name])


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_share_outside_the_line_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="share must be"):
        between(weights_of(1.0), weights_of(2.0), share)


def test_command_writes_shards_of_the_average(tmp_path: Path) -> None:
    tables = [np.zeros((CI.vocab_size, CI.experts_per_token), dtype=np.int32)]
    runs = [initial_weights(CI, seed, tables) for seed in (1, 2)]
    for name, weights in zip(("earlier", "later"), runs, strict=True):
        write_shards(tmp_path / name, weights, {"step": name})
    folders = [str(tmp_path / name) for name in ("earlier", "later", "out")]
    assert main([*folders, "--share", "0.5", "--config", "ci-v4"]) == 0
    found, notes = read_shards(tmp_path / "out", CI)
    stored = [read_shards(tmp_path / name, CI)[0] for name in ("earlier", "later")]
    middle = (stored[0][EXPERT] + stored[1][EXPERT]) / 2
    assert notes["step"] == "later"
    torch.testing.assert_close(found[EXPERT], middle, rtol=2**-8, atol=0)
    assert torch.equal(found[ROUTER], stored[1][ROUTER])
