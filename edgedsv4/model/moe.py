"""Mixture of experts of one layer: router, routed experts grouped by expert, shared expert.

Where the routed experts' weights live is not decided here: an `ExpertSource` hands them over. The
results of one token's experts are added in the order of its slots (ascending expert id, or the
order of the hash table), so the sum does not depend on which other tokens share the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from edgedsv4.kernels.expert_ffn import expert_ffn
from edgedsv4.kernels.precision import accumulator
from edgedsv4.kernels.quant_matmul import quant_matmul
from edgedsv4.kernels.router import rank_experts, router_scores, routing_weights, select_experts

if TYPE_CHECKING:
    from edgedsv4.config import Backend
    from edgedsv4.model.layer_plan import LayerPlan
    from edgedsv4.model.step import Step
    from edgedsv4.model.weights import ExpertWeights, MoeWeights


class ExpertSource(Protocol):
    """Hands over the weights of routed experts, wherever they lie.

    What `fetch` hands over may be a view of the mapped file or sit in any buffer. It must stay in
    place until the next `fetch` of the same thread, or as long as the source lives if `is_resident`
    says so: then a forward fetches each expert once, and later only asks whether the files changed.
    """

    @property
    def is_resident(self) -> bool:
        """Whether every expert stays where `fetch` found it as long as the source lives."""

    def check_unchanged(self) -> None:
        """Raise what `fetch` would raise if a file behind the experts changed.

        Asked once per forward by those who keep the experts of a resident source.
        """

    def fetch(self, layer: int, expert_ids: Sequence[int]) -> Sequence[ExpertWeights]:
        """Weights of `expert_ids` of one layer, in that order.

        Raises:
            ExpertReadError: if they cannot be read.
        """


@runtime_checkable
class ExpertStream(ExpertSource, Protocol):
    """A source whose experts come and go: it hands them over in batches, as they arrive."""

    def begin_forward(self, token_ids: Sequence[int] | None) -> None:
        """Say which tokens the main model evaluates next; None in the draft block."""

    def end_forward(self, tokens: int) -> None:
        """Nothing handed to this thread is used any more; `tokens` is 0 after a failure."""

    def stream(
        self,
        layer: int,
        expert_ids: Sequence[int],
        tokens: int,
        check_stop: Callable[[], None],
    ) -> Iterator[Sequence[tuple[int, ExpertWeights]]]:
        """Hand over each of some experts once, in batches of (id, weights).

        The first batch may be empty. A batch stays until the next one is asked for, the last until
        this thread asks for another layer or its forward ends.

        Args:
            layer: of the experts.
            expert_ids: which.
            tokens: of the chunk.
            check_stop: called every now and then while nothing arrives; raises to stop.

        Raises:
            ExpertReadError: one cannot be read.
        """


class ExpertTable(Protocol):
    """Somebody who knows which experts are in memory, without asking."""

    def put(self, layer: int, expert_id: int, expert: ExpertWeights) -> None:
        """An expert is there until it is dropped."""

    def drop(self, layer: int, expert_id: int) -> None:
        """An expert goes: nobody may use it any more."""

    def clear(self) -> None:
        """All experts go."""


@runtime_checkable
class WatchedStream(ExpertStream, Protocol):
    """A stream that tells what it has, so that experts in memory are used without asking for them.

    One forward at a time may do so. What is in memory goes only while somebody asks for experts, or
    a forward begins or ends.
    """

    def watch(self, table: ExpertTable) -> None:
        """Keep a table up to date from now on."""

    def note_used(self, uses: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Say which experts (layer, ids) were used without being asked for."""

    def let_go(self) -> None:
        """Nothing that was handed to this thread is used any more; its forward may go on."""


@runtime_checkable
class ExpertForesight(Protocol):
    """A stream that can use guesses at what the next layer will ask for."""

    def guesses_wanted(self, layer: int, tokens: int) -> int:
        """How many experts to guess for each token of a layer, 0..64; 0 where it is no use."""

    def guess(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Say what a layer will ask for, while this thread streams the layer before it.

        Args:
            layer: that routes by score.
            expert_ids: each once, the likeliest first.
        """


def stream_of(experts: ExpertSource) -> ExpertStream | None:
    """The source as one that streams; None if it does not."""
    return experts if isinstance(experts, ExpertStream) else None


def foresight_of(experts: ExpertSource) -> ExpertForesight | None:
    """The source as one that uses guesses; None if it does not."""
    return experts if isinstance(experts, ExpertForesight) else None


def likeliest_first(ids: Tensor) -> list[int]:
    """Guesses [T, n] of several tokens, each expert once: all first ones, then all second ones."""
    return list(dict.fromkeys(ids.T.reshape(-1).tolist()))


@contextmanager
def forward_with(
    stream: ExpertStream | None, token_ids: Tensor, *, is_draft: bool
) -> Iterator[None]:
    """One forward of `token_ids` [T], whose experts may come out of a stream."""
    if stream is None:
        yield
        return
    done = 0
    try:
        stream.begin_forward(None if is_draft else token_ids.tolist())
        yield
        done = 0 if is_draft else int(token_ids.shape[0])
    finally:
        stream.end_forward(done)


def moe(
    x: Tensor, weights: MoeWeights, plan: LayerPlan, experts: ExpertSource, step: Step
) -> Tensor:
    """Run the layer's experts.

    Args:
        x: [T, D], normalised input of the sublayer.
        weights: of this layer.
        plan: of this layer.
        experts: source of the routed experts.
        step: the chunk.

    Returns:
        [T, D], dtype of `x`.
    """
    wide = x.to(accumulator(x.dtype))
    scores = router_scores(quant_matmul(wide, weights.router, backend=step.backend))
    ids = _expert_ids(scores, weights, plan, step)
    if step.hooks.on_guesses is not None and step.router_after(plan.layer) is not None:
        most = min(step.hooks.guesses, step.config.num_experts)
        step.hooks.on_guesses(plan.layer + 1, guess_experts(x, plan.layer + 1, most, step))
    factors = routing_weights(scores, ids, step.config.routed_scale, backend=step.backend)
    outputs = _expert_outputs(x, ids, plan, experts, step).to(wide.dtype)
    total = factors[:, :1] * outputs[:, 0]
    for slot in range(1, ids.shape[1]):
        total = total + factors[:, slot : slot + 1] * outputs[:, slot]
    if weights.shared_w1 is not None and weights.shared_w2 is not None:
        total = total + _shared(x, weights, plan, step).to(wide.dtype)
    return total.to(x.dtype)


def guess_experts(x: Tensor, layer: int, most: int, step: Step) -> Tensor:
    """What a layer's router would choose of what the router of the layer before it saw.

    Args:
        x: [T, D], input of the experts of the layer before.
        layer: whose experts are guessed; it routes by score.
        most: experts per token, at most E.
        step: the chunk.

    Returns:
        [T, most] int64, the likeliest first.
    """
    return guess_by_router(x, step.routers[layer], most, backend=step.backend)


def guess_by_router(x: Tensor, weights: MoeWeights, most: int, *, backend: Backend) -> Tensor:
    """What a router would choose of an input; see `guess_experts`."""
    wide = x.to(accumulator(x.dtype))
    scores = router_scores(quant_matmul(wide, weights.router, backend=backend))
    if weights.bias is not None:
        scores = scores + weights.bias.to(scores.dtype)
    return rank_experts(scores, most, backend=backend)


def _tell_guesses(x: Tensor, layer: int, experts: ExpertSource, step: Step) -> None:
    """Guess for the layer after this one, if anybody wants that."""
    foresight = foresight_of(experts)
    if foresight is None or step.router_after(layer) is None:
        return
    most = foresight.guesses_wanted(layer + 1, step.count)
    if most:
        ids = guess_experts(x, layer + 1, min(most, step.config.num_experts), step)
        foresight.guess(layer + 1, likeliest_first(ids))


def _expert_ids(scores: Tensor, weights: MoeWeights, plan: LayerPlan, step: Step) -> Tensor:
    selection = scores if weights.bias is None else scores + weights.bias.to(scores.dtype)
    if weights.expert_table is not None:
        ids = weights.expert_table[step.token_ids]
    else:
        ids = select_experts(selection, step.config.experts_per_token, backend=step.backend)
    if step.hooks.on_experts is not None:
        ids = step.hooks.on_experts(plan.layer, selection, ids)
    return ids


def _expert_outputs(
    x: Tensor, ids: Tensor, plan: LayerPlan, experts: ExpertSource, step: Step
) -> Tensor:
    """[T, k, D]: each token through each of its experts, every expert once over all its tokens."""
    outputs = x.new_empty((*ids.shape, x.shape[-1]))
    used = sorted(set(ids.flatten().tolist()))
    for place, batch in enumerate(_batches(plan.layer, used, experts, step)):
        if place == 0:  # what this layer asks for is being read by now
            _tell_guesses(x, plan.layer, experts, step)
        for expert_id, expert in batch:
            step.hooks.check_stop()
            tokens, slots = (ids == expert_id).nonzero(as_tuple=True)
            outputs[tokens, slots] = expert_ffn(
                x[tokens], expert.w1, expert.w3, expert.w2, plan.swiglu_limit, backend=step.backend
            )
    return outputs


def _batches(
    layer: int, used: Sequence[int], experts: ExpertSource, step: Step
) -> Iterator[Sequence[tuple[int, ExpertWeights]]]:
    """The experts of a layer as they can be had."""
    stream = stream_of(experts)
    if stream is not None:
        return stream.stream(layer, used, step.count, step.hooks.check_stop)
    return iter([list(zip(used, experts.fetch(layer, used), strict=True))])


def _shared(x: Tensor, weights: MoeWeights, plan: LayerPlan, step: Step) -> Tensor:
    w1, w3, w2 = weights.shared_w1, weights.shared_w3, weights.shared_w2
    if w1 is None or w3 is None or w2 is None:
        return x.new_zeros(())
    return expert_ffn(x, w1, w3, w2, plan.shared_swiglu_limit, backend=step.backend)
