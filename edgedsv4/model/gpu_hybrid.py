"""Routed experts of which only a part lives on the card: who computes what, and in which order.

A token: the card computes the chosen experts that live there, the CPU the others meanwhile, and
both sums are added. With host functions of the GPU's runtime all of that is part of the captured
step. A chunk: experts that do not live on the card pass through it, or, while the tokens are few,
the CPU computes them. Without the CPU (`off`) a token's missing experts pass through the card too.

What does not depend on the placement: with `on` the CPU computes every routed expert of a token,
with `off` the card does; and the products of a chunk have the same bits wherever an expert lay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from edgedsv4.errors import ConfigError
from edgedsv4.kernels.gpu.expert_matmul import ExpertPart, ExpertScratch, expert_ffn_parts
from edgedsv4.kernels.gpu.expert_split import split_experts
from edgedsv4.model.gpu_token_experts import ChosenExperts, token_experts

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgedsv4.config import CpuExperts, ModelConfig
    from edgedsv4.kernels.gpu.byte_vector import ByteVector
    from edgedsv4.kernels.gpu.host_calls import HostCalls
    from edgedsv4.model.expert_stager import ExpertStager
    from edgedsv4.model.gpu_banks import PlacedLayer
    from edgedsv4.model.gpu_buffers import StepBuffers
    from edgedsv4.model.gpu_network import DeviceLayer
    from edgedsv4.model.gpu_residents import Residents
    from edgedsv4.model.host_experts import HostExperts


class TokenHost(Protocol):
    """How a step lets the CPU compute a layer."""

    def start(self, layer: int, buffers: StepBuffers) -> None:
        """Send x, ids and weights on their way; the card goes on."""

    def finish(self) -> None:
        """From here on `StepBuffers.host_out` has what the CPU computed."""


class StreamHost:
    """The stream calls C by itself, also when the step is replayed as a graph.

    Args:
        host: computes.
        calls: of the GPU's runtime.
        stream: beside the current one; None for the current one.
    """

    can_be_captured = True

    def __init__(self, host: HostExperts, calls: HostCalls, stream: Any) -> None:
        if not host.is_free_running:
            raise ConfigError("a stream can only call for experts that stay where they are")
        self._host = host
        self._calls = calls
        self._stream = stream

    def start(self, layer: int, buffers: StepBuffers) -> None:
        """See `TokenHost`."""
        host = self._host
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.step.whole.copy_(buffers.for_host.whole, non_blocking=True)
            handle = 0 if self._stream is None else self._stream.cuda_stream
            self._calls.launch(handle, host.function, host.job(layer))
            buffers.host_out.copy_(host.step_out, non_blocking=True)

    def finish(self) -> None:
        """See `TokenHost`."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class CallingHost:
    """The thread that launches computes, too, between two layers' launches."""

    can_be_captured = False

    def __init__(self, host: HostExperts) -> None:
        self._host = host
        self._waiting: tuple[int, StepBuffers, Any] | None = None

    def start(self, layer: int, buffers: StepBuffers) -> None:
        """See `TokenHost`."""
        self._host.step.whole.copy_(buffers.for_host.whole, non_blocking=True)
        self._waiting = layer, buffers, _mark(buffers.x.device)

    def finish(self) -> None:
        """See `TokenHost`."""
        if self._waiting is None:
            return
        layer, buffers, copied = self._waiting
        self._waiting = None
        if copied is not None:
            copied.synchronize()
        self._host.run_step(layer)
        buffers.host_out.copy_(self._host.step_out, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridParts:
    """What a hybrid model consists of."""

    mode: CpuExperts
    stager: ExpertStager
    host: HostExperts | None
    """None with `off`."""
    token_host: StreamHost | CallingHost | None
    """None with `off`."""
    prefers_cpu: Callable[[int], bool]
    """Whether the CPU computes the experts of a chunk of so many tokens faster than they travel."""
    residents: Residents | None = None
    """Who decides which experts live on the card; None where they stay."""


class HybridExperts:
    """The routed experts of a model on a GPU that does not hold them all.

    Args:
        config: shape of the model.
        parts: who computes and who copies.
    """

    def __init__(self, config: ModelConfig, parts: HybridParts) -> None:
        if parts.mode != "off" and (parts.host is None or parts.token_host is None):
            raise ConfigError(f"cpu_experts {parts.mode!r} needs somebody who computes on the CPU")
        self._config = config
        self._parts = parts
        self._stager = parts.stager
        self._check_stop: Callable[[], None] | None = None

    @property
    def can_be_captured(self) -> bool:
        """Whether a step is the same launches for every token."""
        host = self._parts.token_host
        return host is not None and host.can_be_captured

    @property
    def has_tokens_on_card(self) -> bool:
        """Whether the card computes experts of single tokens; with `on` the CPU alone does."""
        return self._parts.mode != "on"

    @property
    def bytes_moved(self) -> int:
        """Bytes of experts that passed through the card so far."""
        return self._stager.bytes_moved

    @property
    def host(self) -> HostExperts | None:
        """Who computes on the CPU."""
        return self._parts.host

    def check(self) -> None:
        """Raise what went wrong on the CPU; once the device is done.

        Raises:
            ExpertReadError: an expert's weights were not there.
            NumericError: the router chose an expert that does not exist.
        """
        if self._parts.host is not None:
            self._parts.host.check()

    def close(self) -> None:
        """End what runs beside the launches; no step may be under way, and none follows."""
        if self._parts.host is not None:
            self._parts.host.close()

    # ---- one token ----

    def begin_token(self, check_stop: Callable[[], None] | None = None) -> None:
        """Before the launches of a token; `check_stop` as in `begin_chunk`, by any thread."""
        self._repair()
        self._check_stop = check_stop
        if self._parts.host is not None:
            self._parts.host.begin(check_stop)

    def end_token(self) -> None:
        """After a token that ended well, and before it is part of the timeline.

        Raises:
            ExpertReadError: an expert that should come to the card cannot be read.
        """
        host, residents = self._parts.host, self._parts.residents
        if host is None:
            return
        host.end_step()
        if residents is not None:
            residents.note(host.seen)

    def _repair(self) -> None:
        if self._parts.residents is not None:
            self._parts.residents.repair()

    @property
    def moves(self) -> int:
        """Experts that came to live on the card since the model was opened."""
        return 0 if self._parts.residents is None else self._parts.residents.moves

    def token(
        self,
        layer: DeviceLayer,
        placed: PlacedLayer,
        buffers: StepBuffers,
        rounded: ByteVector | None,
        family: str,
    ) -> tuple[Tensor, Tensor | None]:
        """Launch the routed experts of a token; ids and weights are in the buffers.

        Args:
            layer: of the network.
            placed: its experts.
            buffers: of the step, x included.
            rounded: x as bytes, where the card's experts are multiplied so.
            family: of the card.

        Returns:
            One or two tensors [1, D] whose sum, in this order, the experts give.
        """
        host = self._parts.token_host
        if host is None:
            self._token_through_card(layer, placed, buffers, rounded, family)
            return buffers.o, None
        is_on_card = self._parts.mode == "auto" and placed.has_residents
        if is_on_card and not placed.missing:
            self._token_on_card(layer, placed, buffers, rounded, family)
            return buffers.o, None
        host.start(placed.layer, buffers)
        if not is_on_card:
            host.finish()
            return buffers.host_out, None
        self._token_on_card(layer, placed, buffers, rounded, family)
        host.finish()
        return buffers.o, buffers.host_out

    def _token_on_card(
        self,
        layer: DeviceLayer,
        placed: PlacedLayer,
        buffers: StepBuffers,
        rounded: ByteVector | None,
        family: str,
    ) -> None:
        """Those of the chosen experts that live here."""
        card = buffers.card
        split_experts(
            card.slots,
            card.weights,
            card.used,
            buffers.expert_ids[0],
            buffers.expert_weights[0],
            placed.table,
        )
        chosen = ChosenExperts(placed.bank.experts, card.slots, card.weights, card.used)
        token_experts(chosen, layer.plan.swiglu_limit, buffers, rounded, family=family)

    def _token_through_card(
        self,
        layer: DeviceLayer,
        placed: PlacedLayer,
        buffers: StepBuffers,
        rounded: ByteVector | None,
        family: str,
    ) -> None:
        """All of the chosen experts; those that are not here are brought first."""
        ids = buffers.expert_ids[0].tolist()
        slots = [int(placed.places[expert]) for expert in ids]
        missing = sorted({expert for expert, slot in zip(ids, slots, strict=True) if slot < 0})
        there = self._stager.bring(placed, missing, self._check_stop)
        brought = dict(zip(missing, there, strict=True))
        slots = [brought.get(expert, slot) for expert, slot in zip(ids, slots, strict=True)]
        card = buffers.card
        card.slots.copy_(torch.tensor(slots, dtype=torch.int32))
        chosen = ChosenExperts(placed.bank.experts, card.slots, buffers.expert_weights[0])
        token_experts(chosen, layer.plan.swiglu_limit, buffers, rounded, family=family)

    # ---- a chunk ----

    def begin_chunk(
        self,
        layers: Sequence[DeviceLayer],
        tokens: int,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """Before the first layer of a chunk: what will be needed may start to travel.

        Args:
            layers: of the chunk.
            tokens: of it.
            check_stop: called every now and then while experts are waited for; raises to stop.
        """
        self._repair()
        if self._parts.host is not None:
            self._parts.host.forget_failures()
        self._stager.begin(tokens, check_stop)
        self._check_stop = check_stop
        if self._takes_all(tokens) and not self._is_for_cpu(tokens):
            self._stager.announce([layer.placed for layer in layers if layer.placed is not None])

    def end_chunk(self) -> None:
        """After the last layer, or when the chunk failed."""
        self._stager.reset()
        self._check_stop = None

    def chunk(
        self,
        out: Tensor,
        chosen: tuple[Tensor, Tensor, Tensor],
        layer: DeviceLayer,
        placed: PlacedLayer,
        scratch: ExpertScratch,
        *,
        precise: bool,
    ) -> None:
        """Compute the routed experts of a chunk.

        Args:
            out: [T, D] f32 out.
            chosen: x [T, D] f32, ids int32 [T, k], weights f32 [T, k].
            layer: the layer.
            placed: its experts.
            scratch: of `expert_ffn_parts`.
            precise: products in f32.
        """
        x, ids, weights = chosen
        options: dict[str, Any] = {
            "experts": self._config.num_experts,
            "scratch": scratch,
            "precise": precise,
        }
        limit = layer.plan.swiglu_limit
        if self._is_for_cpu(len(x)):
            self._chunk_by_cpu(out, chosen, placed, limit, options)
            return
        wanted = placed.missing
        if not self._takes_all(len(x)):
            used = set(ids.flatten().tolist())
            wanted = tuple(expert for expert in placed.missing if expert in used)
        parts = self._parts_of(placed, wanted)
        expert_ffn_parts(out, x, ids, weights, parts, limit, **options)

    def _is_for_cpu(self, tokens: int) -> bool:
        return self._parts.mode != "off" and self._parts.prefers_cpu(tokens)

    def _takes_all(self, tokens: int) -> bool:
        """Whether all experts pass, as a long chunk uses almost every one."""
        return tokens * self._config.experts_per_token >= self._config.num_experts

    def _parts_of(self, placed: PlacedLayer, wanted: Sequence[int]) -> Iterator[ExpertPart]:
        banks = placed.bank.experts.matrices
        if placed.has_residents:
            yield ExpertPart(banks, placed.table)
        for piece in self._stager.pieces(placed, wanted):
            yield ExpertPart(banks, piece.table)

    def _chunk_by_cpu(
        self,
        out: Tensor,
        chosen: tuple[Tensor, Tensor, Tensor],
        placed: PlacedLayer,
        limit: float,
        options: dict[str, Any],
    ) -> None:
        """With `auto` those that live on the card are computed there."""
        host = self._parts.host
        if host is None:
            raise ConfigError("nobody computes on the CPU")
        x, ids, weights = chosen
        is_on_card = self._parts.mode == "auto" and placed.has_residents
        memory = host.chunk(len(x))
        if placed.missing or not is_on_card:
            memory.x.copy_(x, non_blocking=True)
            memory.ids.copy_(ids, non_blocking=True)
            memory.weights.copy_(weights, non_blocking=True)
        copied = _mark(x.device)
        if is_on_card:
            here = torch.where(placed.table[ids.long()] >= 0, ids, -1)
            part = ExpertPart(placed.bank.experts.matrices, placed.table)
            expert_ffn_parts(out, x, here, weights, (part,), limit, **options)
            if not placed.missing:
                return
        if copied is not None:
            copied.synchronize()
        host.run_chunk(placed.layer, self._check_stop)
        if is_on_card:
            out += memory.out.to(out.device, non_blocking=True)
        else:
            out.copy_(memory.out, non_blocking=True)


def _mark(device: torch.device) -> Any:
    """An event at this place of the current stream; None on the CPU, where all is done."""
    if device.type == "cpu":
        return None
    module: Any = torch.xpu if device.type == "xpu" else torch.cuda
    event = module.Event()
    event.record()
    return event
