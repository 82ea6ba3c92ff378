"""The network on a GPU by Triton kernels: a captured graph per token, chunks for the rest.

A token alone goes through `DecodeStep`, which a timeline records once; more tokens, and forwards
that a hook watches, go through `Chunk`. Both fill the same cache. A forward takes the buffers of
the model, so one runs at a time, whoever asks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgedsv4.errors import ConfigError, ShapeError
from edgedsv4.kernels.gpu.gather_rows import embed_streams
from edgedsv4.kernels.gpu.matvec import matvec
from edgedsv4.kernels.rms_norm import rms_norm
from edgedsv4.model.gpu_buffers import StepBuffers, StepPlace
from edgedsv4.model.gpu_cache import GpuKvCache
from edgedsv4.model.gpu_chunk import Chunk, ForwardSetting
from edgedsv4.model.gpu_decode import DecodeStep
from edgedsv4.model.hooks import ForwardHooks
from edgedsv4.model.layer_plan import draft_plan
from edgedsv4.model.model import (
    Forward,
    LogitRows,
    Model,
    broken_logits,
    broken_rows,
    broken_streams,
)
from edgedsv4.model.moe import forward_with

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from edgedsv4.model.gpu_network import DeviceDraft, DeviceHyper, DeviceLayer, DeviceNetwork
    from edgedsv4.model.kv_cache import KvCache, Numerics
    from edgedsv4.model.moe import ExpertSource
    from edgedsv4.model.weights import ModelWeights

_FEW_ROWS = 8
"""Rows whose products `matvec` makes."""
_NO_HOOKS = ForwardHooks()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a card the current one, which is where Triton launches kernels."""
    if device.type == "cpu":
        return nullcontext()
    modules: dict[str, Any] = {"cuda": torch.cuda, "xpu": torch.xpu}
    manager: AbstractContextManager[Any] = modules[device.type].device(device)
    return manager


class GpuModel(Model):
    """A model whose weights are on a GPU.

    Args:
        config: shape of the model.
        weights: as opened; only what is small is kept, for figures.
        experts: as opened; asked whether the files changed.
        numerics: float32 on the device; the profile decides how rows are stored and whether
            products take float32 (`exact`) or bfloat16 operands.
        network: the weights on the device.
        family: of the device, for tables of tile sizes.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        experts: ExpertSource,
        numerics: Numerics,
        *,
        network: DeviceNetwork,
        family: str,
    ) -> None:
        super().__init__(config, weights, experts, numerics, backend="triton")
        self.network = network
        self._family = family
        self._setting = ForwardSetting(
            config=config,
            device=numerics.device,
            family=family,
            is_precise=numerics.profile == "exact",
            hybrid=network.hybrid,
        )
        self._place = StepPlace(config, self.plans, numerics.device)
        self._buffers = StepBuffers(config, network, numerics.device)
        self._lock = threading.Lock()

    def close(self) -> None:
        """See `Model.close`."""
        if self.network.hybrid is not None:
            self.network.hybrid.close()

    def new_cache(self, capacity: int) -> GpuKvCache:
        """State of a new timeline of at most `capacity` tokens."""
        return GpuKvCache(self.config, self.plans, capacity=capacity, numerics=self.numerics)

    def new_draft_cache(self, capacity: int) -> GpuKvCache:
        """State of the draft block for one timeline."""
        plans = (draft_plan(self.config),)
        return GpuKvCache(self.config, plans, capacity=capacity, numerics=self.numerics)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        cache: KvCache,
        *,
        logits: LogitRows = "last",
        hooks: ForwardHooks | None = None,
    ) -> Forward:
        """Evaluate tokens at positions `cache.length` onwards; see `Model.forward`.

        The cache must come from `new_cache`.
        """
        self._check_ids(token_ids, cache)
        if not isinstance(cache, GpuKvCache):
            raise ConfigError("the timeline was made by another model")
        hooks = hooks or _NO_HOOKS
        hooks.check_stop()
        self.experts.check_unchanged()
        is_watched = hooks.on_topk is not None or hooks.on_experts is not None
        with self._one_forward(token_ids):
            if token_ids.shape[0] == 1 and not is_watched:
                return self._one_token(token_ids, cache, logits, hooks)
            return self._chunk(token_ids, cache, logits, hooks)

    @contextmanager
    def _one_forward(self, token_ids: Tensor, *, is_draft: bool = False) -> Iterator[None]:
        """Nobody else uses the buffers, and experts that come and go know what is asked for."""
        stream, device = self.stream, self.numerics.device
        with (
            self._lock,
            on_device(device),
            forward_with(stream, token_ids, is_draft=is_draft),
        ):
            try:
                yield
            except BaseException:
                if stream is not None and device.type != "cpu":
                    # A step that is still under way uses experts, which are let go now.
                    torch.accelerator.synchronize(device)
                raise

    def _one_token(
        self, token_ids: Tensor, cache: GpuKvCache, logits: LogitRows, hooks: ForwardHooks
    ) -> Forward:
        """One token."""
        if cache.step is None:
            cache.step = DecodeStep(self._setting, self.network, cache, self._place, self._buffers)
        buffers, position = self._buffers, cache.length
        self._place.give(int(token_ids[0]), position)
        cache.forget_overwritten()
        cache.step.run(position, hooks.check_stop)
        best, is_bad = buffers.outcome()
        if self.network.hybrid is not None:
            self.network.hybrid.check()
        if is_bad:
            self._explain(buffers.streams, position, 1, buffers.logits)
        if self.network.hybrid is not None:
            self.network.hybrid.end_token()
        cache.commit_step()
        # The buffers belong to the next step.
        made = None if logits == "none" else buffers.logits.clone()
        return Forward(made, buffers.streams.clone(), best)

    def _chunk(
        self, token_ids: Tensor, cache: GpuKvCache, logits: LogitRows, hooks: ForwardHooks
    ) -> Forward:
        ids = token_ids.to(self.numerics.device)
        streams = self._empty_streams(ids.shape[0])
        embed_streams(streams, ids, self.network.embed)
        network = self.network
        chunk = Chunk(self._setting, network.layers, cache, ids, hooks)
        return self._evaluate(chunk, cache, streams, (network.hc_head, network.norm), logits)

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
        """Predict one token further with the MTP block; see `Model.forward_draft`."""
        draft = self.network.draft
        if draft is None:
            raise ConfigError("this model file holds no MTP block")
        self._check_ids(next_ids, cache)
        if streams.shape[:2] != (next_ids.shape[0], self.config.hc_streams):
            raise ShapeError(f"streams are {list(streams.shape)} for {next_ids.shape[0]} tokens")
        if not isinstance(cache, GpuKvCache):
            raise ConfigError("the timeline was made by another model")
        with self._one_forward(next_ids, is_draft=True):
            ids = next_ids.to(self.numerics.device)
            layers: tuple[DeviceLayer, ...] = (draft.layer,)
            chunk = Chunk(self._setting, layers, cache, ids, hooks or _NO_HOOKS)
            mixed = self._draft_streams(chunk, draft, streams, ids)
            return self._evaluate(chunk, cache, mixed, (draft.hc_head, draft.norm), logits)

    def _draft_streams(
        self, chunk: Chunk, draft: DeviceDraft, streams: Tensor, ids: Tensor
    ) -> Tensor:
        """Streams that the draft block starts from, [T, hc, D]."""
        eps = self.config.rms_norm_eps
        embedded = self._empty_streams(ids.shape[0])
        embed_streams(embedded, ids, self.network.embed)
        token = rms_norm(embedded[:, 0], draft.enorm, eps, backend="reference")
        hidden = streams.to(device=self.numerics.device, dtype=torch.float32)
        hidden = rms_norm(hidden, draft.hnorm, eps, backend="reference")
        projected = chunk.product(hidden.flatten(0, 1).contiguous(), draft.h_proj)
        return chunk.product(token.contiguous(), draft.e_proj)[:, None] + projected.view_as(hidden)

    def _evaluate(
        self,
        chunk: Chunk,
        cache: GpuKvCache,
        streams: Tensor,
        ending: tuple[DeviceHyper, Tensor],
        logits: LogitRows,
    ) -> Forward:
        """Run a chunk and its head, and make it part of the timeline."""
        o = chunk.run(streams)
        rows = {"none": 0, "last": 1, "all": chunk.count}[logits]
        y = chunk.head(streams, o, rows, *ending)
        made = self._head_logits(chunk, y) if rows else None
        if not bool(torch.isfinite(streams).all()) or int(chunk.bad):
            self._explain(streams, chunk.start, chunk.count, None)
        if made is not None and not bool(torch.isfinite(made).all()):
            raise broken_logits()
        chunk.commit()
        cache.commit(chunk.count)
        for ring, slots in cache.ring_slots:
            ring.oldest = max(ring.oldest, cache.length - slots)
        return Forward(made, streams)

    def _head_logits(self, chunk: Chunk, y: Tensor) -> Tensor:
        head = self.network.head
        if y.shape[0] > _FEW_ROWS:
            return chunk.product(y, head)
        made = torch.empty((y.shape[0], head.rows), dtype=torch.float32, device=y.device)
        matvec(made, y, [head], family=self._family)
        return made

    def _explain(self, streams: Tensor, start: int, count: int, logits: Tensor | None) -> None:
        """Raise what a value that is not finite means."""
        if not bool(torch.isfinite(streams).all()):
            raise broken_streams(streams, start)
        if logits is not None and not bool(torch.isfinite(logits).all()):
            raise broken_logits()
        raise broken_rows(start, start + count)

    def _empty_streams(self, count: int) -> Tensor:
        shape = (count, self.config.hc_streams, self.config.hidden_size)
        return torch.empty(shape, dtype=torch.float32, device=self.numerics.device)
