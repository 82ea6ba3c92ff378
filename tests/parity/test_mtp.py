"""The MTP block against a second derivation of it, written without sight of the model's code.

Both compute in float64. The derivation gets the model's own rotation angles where agreement to
float64 rounding is asked for, since the model's are float32 by definition; another test leaves it
its own exact angles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numeric
import numpy as np
import pytest
import torch
from file_model import open_model
from memory_model import BACKENDS, ids_tensor, model_of
from parity import mtp_derivation
from tiny_model import (
    Tensors,
    random_tensors,
    random_tokens,
    tiny_config,
    write_gguf,
    write_official,
)

from edgedsv4.kernels.rope import rope_frequencies, rope_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgedsv4.config import ModelConfig
    from edgedsv4.model.model import Model

SEED = 4
TOKENS = 45
CONFIG = tiny_config(num_draft_layers=1, window=16, index_topk=4)


@dataclass(frozen=True)
class Draft:
    """Results of the block for all positions."""

    logits: torch.Tensor
    streams: torch.Tensor


@cache
def tensors() -> Tensors:
    return random_tensors(CONFIG, SEED)


@cache
def tiny() -> Model:
    return model_of(CONFIG, tensors(), dtype=torch.float64)


def token_ids() -> torch.Tensor:
    return ids_tensor(random_tokens(CONFIG, TOKENS + 1, SEED))


def run_draft(model: Model, sizes: list[int]) -> Draft:
    """The main model over all tokens, then the block over positions 0..TOKENS-1 in chunks."""
    ids = token_ids()
    streams = model.forward(ids[:-1], model.new_cache(TOKENS), logits="none").streams
    cache = model.new_draft_cache(TOKENS)
    parts = zip(streams.split(sizes), ids[1:].split(sizes), strict=True)
    results = [model.forward_draft(s, i, cache, logits="all") for s, i in parts]
    logits = torch.cat([r.logits for r in results if r.logits is not None])
    return Draft(logits, torch.cat([r.streams for r in results]))


def derive(model: Model, values: Tensors) -> Draft:
    """The same from the derivation, on the model's own main streams."""
    ids = token_ids()
    streams = model.forward(ids[:-1], model.new_cache(TOKENS), logits="none").streams
    prefix = "mtp.0."
    weights = {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}
    weights |= {name: values[name] for name in ("embed.weight", "head.weight")}
    logits, after = mtp_derivation.mtp_forward(weights, CONFIG, streams.numpy(), ids[1:].numpy())
    return Draft(torch.from_numpy(logits), torch.from_numpy(after))


def model_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the derivation rotate by the model's float32 angles."""
    frequencies = rope_frequencies(CONFIG.rope_dim, CONFIG.rope_theta, None)

    def turn_at(position: int, _config: ModelConfig, *, float32_angles: bool = False) -> np.ndarray:
        assert not float32_angles
        table = rope_table(torch.tensor([position]), frequencies, torch.float64)
        turns: np.ndarray = (table.cos[0] + 1j * table.sin[0]).numpy()
        return turns

    monkeypatch.setattr(mtp_derivation, "turn_at", turn_at)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([TOKENS], id="at once"),
        pytest.param([1] * TOKENS, id="one by one"),
        pytest.param([16, 29], id="window first"),
        pytest.param([7, 31, 7], id="odd chunks"),
    ],
)
def test_block_equals_the_second_derivation(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_angles(monkeypatch)
    got, expected = run_draft(tiny(), sizes), derive(tiny(), tensors())
    numeric.assert_close("logits", got.logits, expected.logits, 1e-9)
    numeric.assert_close("streams", got.streams, expected.streams, 1e-9)


def test_block_rotates_by_the_plain_angles_of_the_derivation() -> None:
    got, expected = run_draft(tiny(), [TOKENS]), derive(tiny(), tensors())
    numeric.assert_close("logits", got.logits, expected.logits, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "sizes", [[TOKENS], [1] * TOKENS, [7, 31, 7]], ids=["at once", "one by one", "odd chunks"]
)
def test_block_in_float32_agrees_to_float32_rounding(
    sizes: list[int], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_angles(monkeypatch)
    single = run_draft(model_of(CONFIG, tensors(), backend=backend), sizes)
    expected = derive(tiny(), tensors())
    numeric.assert_close("logits", single.logits, expected.logits, 2e-5)
    numeric.assert_close("streams", single.streams, expected.streams, 2e-5)


def official(directory: Path, *, quantised: bool) -> tuple[Path, Tensors]:
    path = directory / "official"
    return path, write_official(path, CONFIG, tensors(), quantised=quantised)


def gguf_file(directory: Path, *, quantised: bool) -> tuple[Path, Tensors]:
    path = directory / "model.gguf"
    return path, write_gguf(path, CONFIG, tensors(), types="a" if quantised else "f32")


@pytest.mark.parametrize("quantised", [False, True], ids=["float32", "quantised"])
@pytest.mark.parametrize("write", [official, gguf_file])
def test_block_from_a_file_equals_the_second_derivation(
    write: Callable[..., tuple[Path, Tensors]],
    quantised: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, values = write(tmp_path, quantised=quantised)
    model = open_model(path, dtype=torch.float64)
    model_angles(monkeypatch)
    got, expected = run_draft(model, [TOKENS]), derive(model, values)
    numeric.assert_close("logits", got.logits, expected.logits, 1e-9)


def test_a_further_draft_step_takes_the_block_own_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    model_angles(monkeypatch)
    model, first = tiny(), run_draft(tiny(), [TOKENS])
    ids = token_ids()[1:]
    cache = model.new_draft_cache(TOKENS)
    got = model.forward_draft(first.streams, ids, cache, logits="all")
    prefix = "mtp.0."
    weights = {n.removeprefix(prefix): v for n, v in tensors().items() if n.startswith(prefix)}
    weights |= {name: tensors()[name] for name in ("embed.weight", "head.weight")}
    expected, _ = mtp_derivation.mtp_forward(weights, CONFIG, first.streams.numpy(), ids.numpy())
    assert got.logits is not None
    numeric.assert_close("logits", got.logits, torch.from_numpy(expected), 1e-9)
