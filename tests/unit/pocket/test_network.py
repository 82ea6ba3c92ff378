"""The network in its training form computes what the reference model computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from memory_model import ids_tensor, model_of
from pocket.fake_quant import fp4_weights
from pocket.network import Mode, Network
from pocket.objective import StepOptions, micro_loss
from pocket.optimizer import parameters
from pocket.parameters import from_official, to_official, weight_shapes
from pocket.schedule import RateOptions, rates
from pocket.store import LOOK_AHEAD, TARGET_BIT, Position, TargetRule, make_batch
from tiny_model import random_tensors, tiny_config

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig, Profile

TOKENS = 150  # past 4 * (index_topk + 1), one whole window of 128, no multiple of 32 or 4


@dataclass
class Case:
    config: ModelConfig
    weights: dict[str, torch.Tensor]
    ids: np.ndarray

    def network(self) -> Network:
        # Weights that want gradients keep torch computing every operation, as in training; a
        # kernel's last bit would move roundings.
        wanted = {
            name: w.clone().requires_grad_(w.is_floating_point())
            for name, w in self.weights.items()
        }
        return Network(self.config, wanted)

    def run(self, mode: Mode) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and draft logits of all positions."""
        network = self.network()
        batch = network.sequences(torch.from_numpy(self.ids)[None], mode)
        streams = network.trunk(batch)
        following = torch.zeros_like(batch.tokens)
        following[0, : TOKENS - 1] = torch.from_numpy(self.ids[1:])
        drafted = network.draft(streams, following, batch)
        return (
            network.logits(streams)[:TOKENS].detach(),
            network.logits(drafted, is_draft=True)[: TOKENS - 1].detach(),
        )

    def reference(self, profile: Profile) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of the runtime's model."""
        arrays = {name: weight.numpy() for name, weight in to_official(self.weights)}
        model = model_of(self.config, arrays, profile=profile)
        ids = ids_tensor(self.ids)
        main = model.forward(ids, model.new_cache(TOKENS), logits="all")
        cache = model.new_draft_cache(TOKENS)
        draft = model.forward_draft(main.streams[:-1], ids[1:], cache, logits="all")
        assert main.logits is not None
        assert draft.logits is not None
        return main.logits, draft.logits


@pytest.fixture(scope="module")
def case() -> Case:
    config = tiny_config(num_draft_layers=1, index_heads=8)
    arrays = random_tensors(config, 1)
    weights = from_official(config, {n: torch.from_numpy(a) for n, a in arrays.items()})
    ids = np.random.default_rng(3).integers(3, config.vocab_size, TOKENS)
    ids[0] = 0
    return Case(config, weights, ids)


@pytest.fixture(scope="module")
def exact(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return case.reference("exact")


@pytest.mark.parametrize("path", ["loop", "dense"])
def test_logits_are_those_of_the_reference_model(
    case: Case, exact: tuple[torch.Tensor, ...], path: str
) -> None:
    logits, _ = case.run(Mode(expert_path=path))
    assert (logits - exact[0]).abs().max() < 1e-4


def test_draft_logits_are_those_of_the_reference_model(
    case: Case, exact: tuple[torch.Tensor, ...]
) -> None:
    _, drafted = case.run(Mode())
    assert (drafted - exact[1]).abs().max() < 1e-4


def test_query_blocks_change_nothing(case: Case, exact: tuple[torch.Tensor, ...]) -> None:
    logits, _ = case.run(Mode(query_block=64))
    assert (logits - exact[0]).abs().max() < 1e-4


def test_dense_phase_differs_where_the_selection_begins(
    case: Case, exact: tuple[torch.Tensor, ...]
) -> None:
    logits, _ = case.run(Mode(selection="dense"))
    first = 4 * (case.config.index_topk + 1) - 1
    errors = (logits - exact[0]).abs().amax(dim=-1)
    assert errors[:first].max() < 1e-4
    assert errors[first:].max() > 1e-2


def test_quantised_network_is_the_default_profile(case: Case) -> None:
    rounded = {
        name: fp4_weights(weight) if ".ffn.experts." in name else weight
        for name, weight in case.weights.items()
    }
    # Index scores of rounded queries and keys tie often, and what a tie selects depends on the
    # last bit of a sum: dense selection leaves the roundings themselves to compare.
    config = tiny_config(num_draft_layers=1, index_heads=8, index_topk=TOKENS)
    logits, drafted = Case(config, case.weights, case.ids).run(Mode(is_quantised=True))
    want, want_draft = Case(config, rounded, case.ids).reference("default")
    # A value next to a rounding boundary may fall on either side, and spreads from there.
    assert _divergence(want, logits) < 1e-3
    assert _divergence(want_draft, drafted) < 1e-3


def _divergence(want: torch.Tensor, got: torch.Tensor) -> float:
    p, q = want.log_softmax(dim=-1), got.log_softmax(dim=-1)
    return float((p.exp() * (p - q)).sum(dim=-1).mean())


def test_sequences_of_a_batch_do_not_see_each_other(case: Case) -> None:
    network = case.network()
    other = np.roll(case.ids, 7)
    with torch.no_grad():
        both = network.sequences(torch.from_numpy(np.stack((other, case.ids))), Mode())
        logits = network.logits(network.trunk(both)).view(2, -1, case.config.vocab_size)
    alone, _ = case.run(Mode())
    assert (logits[1, :TOKENS] - alone).abs().max() < 1e-4


def test_packed_document_is_computed_as_if_alone(case: Case) -> None:
    network = case.network()
    before = np.random.default_rng(5).integers(3, case.config.vocab_size, 128)
    packed = np.concatenate((before, case.ids))  # starts on the grid of both ratios
    with torch.no_grad():
        batch = network.sequences(torch.from_numpy(packed)[None], Mode())
        logits = network.logits(network.trunk(batch))[128 : 128 + TOKENS]
    alone, _ = case.run(Mode())
    # Angles of other positions round differently.
    assert (logits - alone).abs().max() < 1e-3


def _step(progress: float, mode: Mode) -> StepOptions:
    now = rates(RateOptions(), step=0, warm_step=0, progress=progress)
    return StepOptions(mode=mode, rates=now, micro_tokens=1 << 20)


def _loss(
    case: Case, options: StepOptions
) -> tuple[Network, torch.Tensor, dict[str, torch.Tensor]]:
    weights = {name: weight.clone() for name, weight in case.weights.items()}
    for _, weight in parameters(weights):
        weight.requires_grad_()
    network = Network(case.config, weights)
    draw = np.random.default_rng(9)
    codes = draw.integers(3, case.config.vocab_size, 2 * 160 + LOOK_AHEAD).astype(np.uint16)
    batch = make_batch(codes | TARGET_BIT, (2, 160), TargetRule(prompt_weight=0.1), Position())
    loss, parts, _ = micro_loss(network, batch.tokens, batch.weights, batch.totals, options, 1.0)
    return network, loss, parts


@pytest.mark.parametrize(
    ("progress", "mode"),
    [
        (0.0, Mode(selection="dense")),
        (0.95, Mode(selection="sparse", is_quantised=True)),
    ],
    ids=["phase A", "phase D"],
)
def test_every_weight_gets_a_gradient(case: Case, progress: float, mode: Mode) -> None:
    network, loss, _ = _loss(case, _step(progress, mode))
    loss.backward()
    silent = [
        name
        for name, weight in parameters(network.weights)
        if weight.grad is None or not bool((weight.grad != 0).any())
    ]
    assert not silent


def test_indexer_loss_reaches_the_indexer_only(case: Case) -> None:
    network, _, parts = _loss(case, _step(0.0, Mode(selection="dense")))
    parts["kl"].backward()
    reached = {name for name, weight in parameters(network.weights) if weight.grad is not None}
    indexer = {name for name in weight_shapes(case.config) if ".indexer." in name}
    assert reached == indexer


def test_language_model_loss_does_not_reach_the_indexer(case: Case) -> None:
    network, _, parts = _loss(case, _step(0.0, Mode(selection="sparse")))
    (parts["lm"] + parts["mtp1"]).backward()
    reached = {name for name, weight in parameters(network.weights) if weight.grad is not None}
    assert not [name for name in reached if ".indexer." in name]


def test_draft_loss_reaches_the_trunk(case: Case) -> None:
    network, _, parts = _loss(case, _step(0.0, Mode(selection="dense")))
    parts["mtp1"].backward()
    first = network.weights["layers.0.attn.wq_a.weight"]
    assert first.grad is not None
    assert bool((first.grad != 0).any())
