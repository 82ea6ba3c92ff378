"""What a forward on a GPU computes in: positions, rotations, and the buffers of one decoded token.

Kernels of a captured step read and write fixed addresses, so everything here is allocated once per
model and lent to one forward at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgedsv4.kernels.gpu.byte_vector import empty_bytes
from edgedsv4.kernels.gpu.place import place
from edgedsv4.kernels.rope import rope_frequencies
from edgedsv4.model.host_experts import StepMemory, step_words

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from edgedsv4.kernels.gpu.byte_vector import ByteVector, Order
    from edgedsv4.model.gpu_network import DeviceNetwork
    from edgedsv4.model.layer_plan import LayerPlan, RopePlan

RopeKey = tuple["RopePlan", int]
"""A layer's rotation, and the ratio of the windows whose first position is meant; 0: the token."""


class StepPlace:
    """Token and position of a step on the device, and the rotations that follow from them."""

    def __init__(
        self, config: ModelConfig, plans: Sequence[LayerPlan], device: torch.device
    ) -> None:
        keys: dict[RopeKey, None] = {}
        for plan in plans:
            keys[plan.rope, 0] = None
            keys[plan.rope, plan.ratio] = None
        self._rows = {key: row for row, key in enumerate(keys)}
        frequencies = [
            rope_frequencies(config.rope_dim, rope.theta, rope.scaling) for rope, _ in keys
        ]
        self._frequencies = torch.stack(frequencies).to(device)
        ratios = [max(ratio, 1) for _, ratio in keys]
        self._ratios = torch.tensor(ratios, dtype=torch.int64, device=device)
        self.given = torch.zeros(2, dtype=torch.int64, device=device)
        """Token id and position, written by the host."""
        self._staged = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.token_ids = self.given[:1]
        """[1] int64."""
        self.position = torch.zeros(1, dtype=torch.int32, device=device)
        shape = self._frequencies.shape
        self._cos = torch.empty(shape, dtype=torch.float32, device=device)
        self._sin = torch.empty(shape, dtype=torch.float32, device=device)

    def give(self, token_id: int, position: int) -> None:
        """Say which token comes next; the step before must be done."""
        self._staged[0], self._staged[1] = token_id, position
        self.given.copy_(self._staged, non_blocking=True)

    def launch(self, bad: Tensor) -> None:
        """Follow `given`, and set `bad` to 0; part of a captured step."""
        place(
            self.position,
            bad,
            self._cos,
            self._sin,
            given=self.given,
            ratios=self._ratios,
            frequencies=self._frequencies,
        )

    def rotation(self, rope: RopePlan, ratio: int = 0) -> tuple[Tensor, Tensor]:
        """Cos and sin [1, r / 2]: of the position, or of the first one of its window."""
        row = self._rows[rope, ratio]
        return self._cos[row : row + 1], self._sin[row : row + 1]


class CardExperts:
    """Those of a token's experts that the card computes: slots of the bank first in line."""

    def __init__(self, chosen: int, device: torch.device) -> None:
        self.slots = torch.zeros(chosen, dtype=torch.int32, device=device)
        self.weights = torch.zeros(chosen, dtype=torch.float32, device=device)
        self.used = torch.zeros(1, dtype=torch.int32, device=device)


def _quiet_event(device: torch.device) -> Any:
    """An event that is waited for without keeping a CPU busy, where all CPUs compute experts."""
    if device.type != "cuda":
        return None
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


class StepBuffers:
    """Activations of one token, all layers alike."""

    def __init__(self, config: ModelConfig, network: DeviceNetwork, device: torch.device) -> None:
        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        layers = network.layers
        hidden, streams = config.hidden_size, config.hc_streams
        self.streams = floats(1, streams, hidden)
        chosen = config.experts_per_token
        self.for_host = StepMemory(hidden, chosen, floats(step_words(hidden, chosen)[2]))
        """What the CPU needs of a token to compute experts: x, weights and ids side by side."""
        self.x = self.for_host.x
        self.host_out = floats(1, hidden)
        """What the CPU gave."""
        self.card = CardExperts(chosen, device)
        self.o = floats(1, hidden)
        self.post = floats(1, streams)
        self.comb = floats(1, streams, streams)
        self.entrance = floats(1, max(layer.entrance.width for layer in layers))
        self.qr = floats(1, config.q_lora_rank)
        self.queries = floats(1, max(layer.queries.width for layer in layers))
        self.attended = floats(1, config.num_heads * config.head_dim)
        self.grouped = floats(1, config.output_groups * config.output_lora_rank)
        self.router = floats(1, config.num_experts)
        self.expert_ids = self.for_host.ids
        self.expert_weights = self.for_host.weights
        self.inner = floats(chosen * config.expert_width)
        self._device = device
        self._rounded: dict[tuple[int, Order], ByteVector] = {}
        width = config.num_shared_experts * config.expert_width
        self.shared_both = floats(1, 2 * width)
        self.shared_inner = floats(1, width)
        self.shared = floats(1, hidden)
        self.y = floats(1, hidden)
        self.logits = floats(1, config.vocab_size)
        self.selected = torch.empty((1, config.index_topk), dtype=torch.int32, device=device)
        self.result = torch.zeros(2, dtype=torch.int32, device=device)
        """What the host needs of a step: the likeliest next token, and whether it went wrong."""
        self.host_result = torch.zeros(2, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._done = _quiet_event(device) if network.hybrid is not None else None
        self.best = self.result[:1]
        self.bad = self.result[1:]

    def rounded(self, columns: int, order: Order) -> ByteVector:
        """Place for a vector of bytes; the same one for the same size and order."""
        key = (columns, order)
        if key not in self._rounded:
            self._rounded[key] = empty_bytes(columns, order, self._device)
        return self._rounded[key]

    def outcome(self) -> tuple[int, bool]:
        """The likeliest next token and whether a value was not finite; waits for the device."""
        self.host_result.copy_(self.result, non_blocking=True)
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        elif self.result.device.type != "cpu":
            torch.accelerator.current_stream().synchronize()
        best, bad = self.host_result.tolist()
        return best, bool(bad) or best < 0
