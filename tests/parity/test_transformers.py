"""Random models of other shapes against `transformers`, an independent implementation.

Ten stored seeds; `--fresh` draws another model and prints its seed, `--seed N` draws it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numeric
import numpy as np
import pytest
import torch
from memory_model import evaluate, model_of
from parity.transformers_peer import Peer, PeerRun
from random_configs import RandomCase, draw_case
from selections import ForcedSelections
from structure_data import STORED, dequantized, official_tensors
from tiny_model import random_tensors, random_tokens

from edgedsv4.formats.metadata import config_from_json

LIMIT = 5e-4
"""Largest difference of a logit; two independent float32 engines differ by up to 1.3e-4."""

SEEDS = (1, 2, 3, 5, 7, 8, 9, 10, 12, 105)


def explain(case: RandomCase, forced: ForcedSelections, peer: PeerRun, got: torch.Tensor) -> str:
    """Where the first difference is, for the message of a failure."""
    row = numeric.first_wrong_row(got, peer.logits, LIMIT)
    first = min(forced.flips, key=lambda flip: (flip.layer, flip.position), default=None)
    return f"first wrong position {row}, first other selection {first}; {case.config}"


def test_logits_equal_those_of_transformers(drawn_seed: int) -> None:
    case = draw_case(drawn_seed)
    tensors = random_tensors(case.config, drawn_seed)
    token_ids = random_tokens(case.config, case.token_count, drawn_seed)
    peer = Peer(case.config, tensors).prefill(token_ids)
    forced = ForcedSelections(peer.topk, peer.experts)
    got = evaluate(model_of(case.config, tensors), token_ids, hooks=forced.hooks())
    clear = [flip for flip in forced.flips if not flip.is_near_tie]
    assert not clear, f"{numeric.quiet(clear)}: {explain(case, forced, peer, got)}"
    worst = float((got - peer.logits).abs().max())
    assert worst <= LIMIT, f"differs by {worst:.3g}: {explain(case, forced, peer, got)}"


def test_peer_reproduces_its_stored_logits() -> None:
    stored = official_tensors()
    names = (name for name in stored if not name.endswith(".scale"))
    tensors = {name: dequantized(name, stored) for name in names}
    config = config_from_json(STORED / "official" / "config.json")
    run = Peer(config, tensors).prefill(np.fromfile(STORED / "tokens.i32", dtype=np.int32))
    expected = np.load(STORED / "logits_transformers_f32.npy")
    numeric.assert_logits("this transformers", run.logits, expected, 2e-4)


@pytest.mark.parametrize("seed", [12, 105])
def test_default_profile_equals_transformers_with_fp8_rows(seed: int) -> None:
    """Every expert follows from the token and every row is seen, so nothing discrete can flip."""
    drawn = draw_case(seed)
    layers = drawn.config.num_layers
    config = replace(drawn.config, num_hash_layers=layers, index_topk=drawn.token_count)
    tensors = random_tensors(config, seed)
    token_ids = random_tokens(config, drawn.token_count, seed)
    peer = Peer(config, tensors)
    got = evaluate(model_of(config, tensors, profile="default"), token_ids)
    cost = numeric.mean_kl(peer.prefill(token_ids).logits, got)
    left = numeric.mean_kl(peer.prefill_with_fp8_rows(token_ids), got)
    # What is left are values next to a rounding boundary; the rounding itself costs 100 times more.
    assert left < 1e-3, f"KL {left:.3g} to the rounded peer, {cost:.3g} to the exact one"
    assert left < cost / 10


@pytest.mark.parametrize(
    "has",
    [
        pytest.param(lambda c: c.config.compress_ratios[:4] == (128, 128, 4, 128), id="pro ratios"),
        pytest.param(lambda c: c.config.compress_ratios[:3] == (0, 0, 4), id="flash ratios"),
        pytest.param(lambda c: c.config.window == 128, id="window 128"),
        pytest.param(lambda c: c.config.routed_scale == 2.5, id="routed scale 2.5"),
        pytest.param(lambda c: c.config.index_topk == 8, id="topk 8"),
        pytest.param(lambda c: c.config.index_topk == 1024, id="topk 1024"),
        pytest.param(lambda c: c.token_count == 3000 and c.config.index_topk < 700, id="3,000"),
        pytest.param(lambda c: c.config.num_hash_layers == 0, id="no hash layer"),
        pytest.param(lambda c: c.config.num_hash_layers == 3, id="three hash layers"),
        pytest.param(lambda c: c.config.rope_scaling is None, id="no YaRN"),
        pytest.param(lambda c: c.config.output_groups == 3, id="three groups"),
    ],
)
def test_stored_seeds_include(has: Callable[[RandomCase], bool]) -> None:
    assert any(has(draw_case(seed)) for seed in SEEDS)
