"""One training step's loss and its statistics, added up on the device.

loss = LM + w_mtp * MTP + KL(indexer) + w_balance * balance. The MTP block sees the trunk's streams
before the head mix and the next token, and predicts the one after it; in the last steps it is fed
with its own streams once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from pocket.network import Mode, Network, Sequences
    from pocket.schedule import Rates
    from pocket.store import Batch

PARTS = ("lm", "lm_right", "mtp1", "mtp1_right", "mtp2", "mtp2_right", "kl", "balance")
"""Statistics that `Meter` adds up, each a mean per step."""


class Meter:
    """Sums of what steps report, on the device until they are read."""

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self.sums = torch.zeros(len(PARTS), device=device)
        self.loads = torch.zeros((layers, experts), device=device)
        self.norm = torch.zeros((), device=device)
        self.steps = 0

    def add_parts(self, parts: dict[str, Tensor], scale: float = 1.0) -> None:
        """Add some statistics by name."""
        zero = self.sums.new_zeros(())
        values = [parts.get(name, zero).detach() for name in PARTS]
        self.sums += torch.stack([value.to(self.sums) for value in values]) * scale

    def read(self) -> dict[str, float]:
        """Means per step; waits for the device."""
        means = (self.sums / max(1, self.steps)).tolist()
        return dict(zip(PARTS, means, strict=True))

    def load_ratios(self) -> list[float]:
        """Largest load over mean load, per layer, MTP block last."""
        ratios = self.loads.amax(dim=1) / self.loads.mean(dim=1).clamp(min=1e-9)
        return [round(ratio, 3) for ratio in ratios.tolist()]

    def reset(self) -> None:
        """Start over."""
        self.sums.zero_()
        self.loads.zero_()
        self.norm.zero_()
        self.steps = 0


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How one step is computed."""

    mode: Mode
    rates: Rates
    micro_tokens: int
    """Tokens of one forward and backward pass; at least one sequence is taken."""
    has_document_mask: bool = True


def accumulate_gradients(
    network: Network, batch: Batch, options: StepOptions, meter: Meter
) -> Tensor:
    """Add the gradients of one batch, in micro-batches.

    Args:
        network: whose weights get gradients.
        batch: sequences.
        options: how.
        meter: gets the statistics.

    Returns:
        [layers + 1, E] tokens per expert, MTP block last.
    """
    rows = batch.tokens.shape[0]
    size = max(1, min(rows, options.micro_tokens // batch.length))
    starts = range(0, rows, size)
    loads: list[Tensor] = []
    for start in starts:
        tokens, weights = batch.part(slice(start, start + size), network.device)
        share = tokens.shape[0] / rows
        loss, parts, sequences = micro_loss(network, tokens, weights, batch.totals, options, share)
        loss.backward()  # type: ignore[no-untyped-call]
        meter.add_parts(parts)
        counted = sequences.watched.loads
        loads.append(torch.stack([counted[layer].detach() for layer in sorted(counted)]))
    total = torch.stack(loads).sum(dim=0)
    meter.loads += total
    meter.steps += 1
    return total


def micro_loss(
    network: Network,
    tokens: Tensor,
    weights: Tensor,
    totals: tuple[float, float, float],
    options: StepOptions,
    share: float,
) -> tuple[Tensor, dict[str, Tensor], Sequences]:
    """Loss of some sequences as their part of the whole batch's.

    Args:
        network: to run.
        tokens: [b, S + 3].
        weights: [3, b, S].
        totals: sums of the whole batch's weights.
        options: how.
        share: sequences here over sequences of the batch.
    """
    length = weights.shape[-1]
    sequences = network.sequences(
        tokens[:, :length], options.mode, has_document_mask=options.has_document_mask
    )
    padding = sequences.tokens.shape[1] - length
    targets = [
        functional.pad(tokens[:, ahead : ahead + length], (0, padding)) for ahead in (1, 2, 3)
    ]
    weights = functional.pad(weights, (0, padding))
    streams = network.trunk(sequences)

    def head(streams: Tensor, step: int, *, is_draft: bool) -> tuple[Tensor, Tensor]:
        scale = 1 / max(totals[step], 1.0)
        loss, right = network.head_loss(
            streams, targets[step].flatten(), weights[step].flatten(), is_draft=is_draft
        )
        return loss * scale, right * scale

    parts: dict[str, Tensor] = {}
    parts["lm"], parts["lm_right"] = head(streams, 0, is_draft=False)
    loss = parts["lm"]
    for step in range(1, options.rates.draft_steps + 1):
        streams = network.draft(streams, targets[step - 1], sequences)
        parts[f"mtp{step}"], parts[f"mtp{step}_right"] = head(streams, step, is_draft=True)
        loss = loss + options.rates.draft * parts[f"mtp{step}"]
    for name, values, weight in (
        ("kl", sequences.watched.divergences, 1.0),
        ("balance", sequences.watched.balances, options.rates.balance),
    ):
        if values:
            parts[name] = torch.stack(values).mean() * share
            loss = loss + weight * len(values) * parts[name]
    return loss, parts, sequences


@torch.no_grad()
def move_selection_biases(network: Network, loads: Tensor, speed: float) -> None:
    """b_e += speed * sign(mean load - load_e), in every layer routed by score.

    Args:
        network: whose biases move.
        loads: [layers + 1, E], as `accumulate_gradients` returns them.
        speed: u.
    """
    if not speed:
        return
    moves = torch.sign(loads.mean(dim=1, keepdim=True) - loads) * speed
    for layer in range(loads.shape[0]):
        place = "mtp.0" if layer == network.config.num_layers else f"layers.{layer}"
        bias = network.weights.get(f"{place}.ffn.gate.bias")
        if bias is not None:
            bias += moves[layer]
