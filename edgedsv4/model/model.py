"""The network: embedding, layers, head. Token ids and a timeline's state in, logits out.

A forward evaluates the next T positions of a timeline and then commits them; when anything fails, a
cancel and Ctrl+C included, the state is what it was before. No files, threads or policy here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from edgedsv4.errors import ConfigError, NumericError, ShapeError
from edgedsv4.kernels.mhc import head_mix, read_streams
from edgedsv4.kernels.precision import accumulator
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize, quant_matmul
from edgedsv4.kernels.rms_norm import rms_norm
from edgedsv4.model.block import decoder_layer
from edgedsv4.model.hooks import ForwardHooks
from edgedsv4.model.kv_cache import KvCache, Numerics
from edgedsv4.model.layer_plan import LayerPlan, RopePlan, draft_plan, layer_plans
from edgedsv4.model.moe import forward_with, stream_of
from edgedsv4.model.step import Step

if TYPE_CHECKING:
    from edgedsv4.config import Backend, ModelConfig
    from edgedsv4.model.moe import ExpertSource
    from edgedsv4.model.weights import HyperWeights, LayerWeights, ModelWeights

LogitRows = Literal["all", "last", "none"]


@dataclass(frozen=True, slots=True)
class Forward:
    """What one forward computed."""

    logits: Tensor | None
    """[T, V] or [1, V], float32 (float64 in a float64 model); None when not asked for."""
    streams: Tensor
    """[T, hc, D], the residual streams after the last layer."""
    best: int | None = None
    """The likeliest token after the last one, where the device found it on the way."""


class Model:
    """A loaded model, computed by torch. It keeps no state of any timeline; one `KvCache` does."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        experts: ExpertSource,
        numerics: Numerics,
        *,
        backend: Backend = "reference",
    ) -> None:
        self.config = config
        self.weights = weights
        self.experts = experts
        self.stream = stream_of(experts)
        """The experts, if they come and go."""
        self.numerics = numerics
        self.backend: Backend = backend
        self.plans = layer_plans(config)
        self._frequencies: dict[RopePlan, Tensor] = {}

    def close(self) -> None:
        """End what runs beside forwards; none may be under way, and none follows."""

    def new_cache(self, capacity: int) -> KvCache:
        """State of a new timeline of at most `capacity` tokens."""
        return self._cache(self.plans, capacity)

    def new_draft_cache(self, capacity: int) -> KvCache:
        """State of the draft block for one timeline."""
        return self._cache((draft_plan(self.config),), capacity)

    def _cache(self, plans: Sequence[LayerPlan], capacity: int) -> KvCache:
        return KvCache(self.config, plans, capacity=capacity, numerics=self.numerics)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        cache: KvCache,
        *,
        logits: LogitRows = "last",
        hooks: ForwardHooks | None = None,
    ) -> Forward:
        """Evaluate tokens at positions `cache.length` onwards.

        Args:
            token_ids: [T] int64, T >= 1, each below vocab_size.
            cache: the timeline; T more tokens must fit.
            logits: for which rows the head is computed.
            hooks: watch, steer or stop.

        Raises:
            ConfigError: if a token id is out of range, or the tokens do not fit.
            CancelledError: if `hooks.should_stop` said so.
            NumericError: if a value became NaN or infinite.
            In every case `cache` is unchanged.
        """
        self._check_ids(token_ids, cache)
        step = self._step(token_ids, cache, hooks)
        step.routers = tuple(layer.moe for layer in self.weights.layers)

        def run() -> Forward:
            embedded = embed(self.weights.embed, step.token_ids, self.numerics.dtype)
            streams = embedded[:, None, :].expand(-1, self.config.hc_streams, -1)
            pairs = tuple(zip(self.weights.layers, self.plans, strict=True))
            streams = self._run_layers(streams, pairs, cache, step)
            norm, hyper = self.weights.norm, self.weights.hc_head
            return Forward(self._logits(streams, norm, hyper, logits, step), streams)

        with forward_with(self.stream, step.token_ids, is_draft=False):
            return _transaction(run, cache, step.count)

    @torch.inference_mode()
    def forward_draft(
        self,
        streams: Tensor,
        next_ids: Tensor,
        cache: KvCache,
        *,
        logits: LogitRows = "last",
        hooks: ForwardHooks | None = None,
    ) -> Forward:
        """Predict one token further with the MTP block.

        Args:
            streams: [T, hc, D], the main model's streams of T consecutive positions (before its
                head), or the draft block's own for a further draft.
            next_ids: [T] int64, the token after each of those positions.
            cache: from `new_draft_cache`, fed with every position in order.
            logits: for which rows the head is computed.
            hooks: watch, steer or stop.

        Returns:
            Logits of the token after the next one, and the block's streams.

        Raises:
            ConfigError: if the model has no draft block, or as for `forward`.
        """
        draft = self.weights.draft
        if draft is None:
            raise ConfigError("this model file holds no MTP block")
        self._check_ids(next_ids, cache)
        if streams.shape[:2] != (next_ids.shape[0], self.config.hc_streams):
            raise ShapeError(f"streams are {list(streams.shape)} for {next_ids.shape[0]} tokens")
        step = self._step(next_ids, cache, hooks)

        def run() -> Forward:
            eps, backend = self.config.rms_norm_eps, step.backend
            embedded = embed(self.weights.embed, step.token_ids, self.numerics.dtype)
            token = rms_norm(embedded, draft.enorm, eps, backend=backend)
            token = quant_matmul(token, draft.e_proj, backend=backend)
            hidden = rms_norm(streams.to(self.numerics.dtype), draft.hnorm, eps, backend=backend)
            hidden = quant_matmul(hidden, draft.h_proj, backend=backend)
            pairs = ((draft.layer, draft_plan(self.config)),)
            mixed = self._run_layers(token[:, None, :] + hidden, pairs, cache, step)
            return Forward(self._logits(mixed, draft.norm, draft.hc_head, logits, step), mixed)

        with forward_with(self.stream, step.token_ids, is_draft=True):
            return _transaction(run, cache, step.count)

    def _check_ids(self, token_ids: Tensor, cache: KvCache) -> None:
        if token_ids.dim() != 1 or token_ids.shape[0] < 1 or token_ids.dtype != torch.int64:
            raise ShapeError(f"token ids must be [T] int64, found {list(token_ids.shape)}")
        values = token_ids.tolist()
        low, high = min(values), max(values)
        if low < 0 or high >= self.config.vocab_size:
            bad = low if low < 0 else high
            raise ConfigError(f"token ids must be 0..{self.config.vocab_size - 1}, found {bad}")
        if cache.length + token_ids.shape[0] > cache.capacity:
            raise ConfigError(
                f"{token_ids.shape[0]} tokens at position {cache.length} exceed the"
                f" capacity {cache.capacity}"
            )

    def _step(self, token_ids: Tensor, cache: KvCache, hooks: ForwardHooks | None) -> Step:
        return Step(
            config=self.config,
            start=cache.length,
            token_ids=token_ids.to(self.numerics.device),
            dtype=self.numerics.dtype,
            is_quantized=self.numerics.profile == "default",
            backend=self.backend,
            hooks=hooks or ForwardHooks(),
            frequencies=self._frequencies,
        )

    def _run_layers(
        self,
        streams: Tensor,
        layers: Sequence[tuple[LayerWeights, LayerPlan]],
        cache: KvCache,
        step: Step,
    ) -> Tensor:
        for weights, plan in layers:
            step.hooks.check_stop()
            streams = decoder_layer(streams, weights, plan, cache, self.experts, step)
        if not bool(torch.isfinite(streams).all()):
            raise broken_streams(streams, step.start)
        if not step.watched_are_finite():
            raise broken_rows(step.start, step.stop)
        return streams

    def _logits(
        self,
        streams: Tensor,
        norm: Tensor,
        hyper: HyperWeights,
        rows: LogitRows,
        step: Step,
    ) -> Tensor | None:
        if rows == "none":
            return None
        wanted = streams[-1:] if rows == "last" else streams
        pre = head_mix(
            wanted, hyper.fn, hyper.base, hyper.scale, step.hyper_constants, backend=step.backend
        )
        y = rms_norm(
            read_streams(wanted, pre), norm, self.config.rms_norm_eps, backend=step.backend
        )
        result = quant_matmul(y.to(accumulator(y.dtype)), self.weights.head, backend=step.backend)
        if not bool(torch.isfinite(result).all()):
            raise broken_logits()
        return result


def broken_streams(streams: Tensor, start: int) -> NumericError:
    """The error for streams [T, hc, D] of positions from `start` that are not all finite."""
    rows = torch.isfinite(streams).flatten(1).all(dim=1)
    position = start + int(rows.logical_not().nonzero()[0])
    return NumericError(
        f"the hidden state became NaN or infinite at position {position}; the weights may be"
        " damaged (open with verify=True to check them)"
    )


def broken_rows(start: int, stop: int) -> NumericError:
    """The error for something behind a rounding or a selection that was not finite."""
    return NumericError(
        f"a compressed row or index score became NaN or infinite at positions {start}..{stop - 1};"
        " the weights may be damaged (open with verify=True to check them)"
    )


def broken_logits() -> NumericError:
    """The error for logits that are not finite."""
    return NumericError("a logit became NaN or infinite; the head may be damaged")


def embed(weight: QuantMatrix, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Embedding rows of some tokens.

    Args:
        weight: [V, D] as stored.
        token_ids: [T] int64.
        dtype: of the result.

    Returns:
        [T, D].
    """
    if weight.scale is None:
        gathered = replace(weight, rows=token_ids.shape[0], data=weight.data[token_ids])
        return dequantize(gathered, dtype)
    # Scales are shared by blocks of rows, so rows cannot be gathered before they are decoded.
    rows = [dequantize(weight, dtype, rows=slice(i, i + 1)) for i in token_ids.tolist()]
    return torch.cat(rows)


def _transaction(run: Callable[[], Forward], cache: KvCache, count: int) -> Forward:
    """Commit what `run` staged in `cache`, or leave the cache as it was."""
    try:
        result = run()
    except BaseException:
        cache.discard()
        raise
    cache.commit(count)
    return result
