"""The network in C: one call carries a chunk through all layers.

Python fills in a step record, looks at what comes back and commits. The C code returns early where
Python has something to do: a selection to show to a hook, an expert to fetch. Working memory is
lent by a pool, since several timelines may be evaluated at once.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgedsv4.errors import ConfigError, ShapeError
from edgedsv4.kernels.native.library import library, new_run, pointer
from edgedsv4.kernels.router import router_scores
from edgedsv4.model.hooks import MOST_GUESSES, ForwardHooks
from edgedsv4.model.indexer import ascending
from edgedsv4.model.layer_plan import OVERLAP_RATIO, LayerPlan
from edgedsv4.model.model import (
    Forward,
    LogitRows,
    Model,
    broken_logits,
    broken_rows,
    broken_streams,
)
from edgedsv4.model.moe import foresight_of, forward_with, likeliest_first
from edgedsv4.model.native_cache import NativeKvCache
from edgedsv4.model.native_network import DescribedExperts, NativeLayers, NativeNetwork

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from edgedsv4.config import ModelConfig
    from edgedsv4.kernels.native.library import NativeRun
    from edgedsv4.model.kv_cache import KvCache, Numerics
    from edgedsv4.model.moe import ExpertSource, ExpertStream
    from edgedsv4.model.weights import ExpertWeights, ModelWeights

DK_SMALL_TOKENS = 16
"""Chunks up to this size give a token the same bits as evaluating it alone."""
_PAUSED = 2
_AFTER_SELECTION = 1
_ALIGNMENT = 64
_NO_HOOKS = ForwardHooks()


@dataclass(slots=True)
class _Chunk:
    """What one call evaluates."""

    layers: NativeLayers
    head: Any
    """`dk_hyper *` of the head."""
    token_ids: Tensor
    given: Tensor | None
    """[T, hc, D] float32, streams that the draft block starts from; None in the main model."""
    cache: NativeKvCache
    hooks: ForwardHooks
    streams: Tensor
    """[T, hc, D] float32, filled by the call."""

    @property
    def count(self) -> int:
        """T."""
        return int(self.token_ids.shape[0])

    def has_router_after(self, place: int) -> bool:
        """Whether the layer behind the one at `place` is there and routes by score."""
        following = self.layers.weights[place + 1 : place + 2]
        return bool(following) and following[0].moe.expert_table is None


class NativeModel(Model):
    """A loaded model that the C kernels compute, in float32 on the CPU.

    Args:
        config: shape of the model.
        weights: everything but the routed experts.
        experts: source of those.
        numerics: f32 on the CPU; the profile `default` also rounds activations to int8.
        threads: that compute, the calling one included.
        is_pinned: each keeps to one CPU.

    Raises:
        BackendUnavailableError: if the kernels are not built, or cannot read a weight; see
            `native_obstacle`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        experts: ExpertSource,
        numerics: Numerics,
        *,
        threads: int = 1,
        is_pinned: bool = False,
    ) -> None:
        super().__init__(config, weights, experts, numerics, backend="native")
        has_int8 = numerics.profile == "default"
        self.network = NativeNetwork(config, weights, self.plans, has_int8=has_int8)
        self.threads = threads
        self._is_pinned = is_pinned
        self._free: list[_Workspace] = []
        self._kept: list[Sequence[ExpertWeights]] = []
        self._described = DescribedExperts()
        self._foresight = foresight_of(experts)

    def new_cache(self, capacity: int) -> NativeKvCache:
        """State of a new timeline of at most `capacity` tokens."""
        return self._native_cache(self.network.main, capacity)

    def new_draft_cache(self, capacity: int) -> NativeKvCache:
        """State of the draft block for one timeline.

        Raises:
            ConfigError: if the model has no draft block.
        """
        return self._native_cache(self._draft_layers(), capacity)

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
        network = self.network
        own = self._checked(token_ids, cache, network.main)
        streams = torch.empty((token_ids.shape[0], self.config.hc_streams, self.config.hidden_size))
        chunk = _Chunk(
            network.main,
            network.head,
            token_ids.contiguous(),
            None,
            own,
            hooks or _NO_HOOKS,
            streams,
        )
        return self._evaluate(chunk, logits)

    def forward_draft(
        self,
        streams: Tensor,
        next_ids: Tensor,
        cache: KvCache,
        *,
        logits: LogitRows = "last",
        hooks: ForwardHooks | None = None,
    ) -> Forward:
        """Predict one token further with the MTP block; see `Model.forward_draft`.

        The cache must come from `new_draft_cache`.
        """
        layers = self._draft_layers()
        own = self._checked(next_ids, cache, layers)
        if streams.shape[:2] != (next_ids.shape[0], self.config.hc_streams):
            raise ShapeError(f"streams are {list(streams.shape)} for {next_ids.shape[0]} tokens")
        given = streams.to(torch.float32).contiguous()
        mixed = torch.empty(given.shape)
        head = self.network.draft_head
        ids = next_ids.contiguous()
        chunk = _Chunk(layers, head, ids, given, own, hooks or _NO_HOOKS, mixed)
        return self._evaluate(chunk, logits)

    def _native_cache(self, layers: NativeLayers, capacity: int) -> NativeKvCache:
        return NativeKvCache(self.config, layers, capacity=capacity, numerics=self.numerics)

    def _draft_layers(self) -> NativeLayers:
        if self.network.draft is None:
            raise ConfigError("this model file holds no MTP block")
        return self.network.draft

    def _checked(self, token_ids: Tensor, cache: KvCache, layers: NativeLayers) -> NativeKvCache:
        self._check_ids(token_ids, cache)
        if not isinstance(cache, NativeKvCache) or cache.native_layers is not layers:
            raise ConfigError("the timeline was made by another model")
        return cache

    def _evaluate(self, chunk: _Chunk, logits: LogitRows) -> Forward:
        workspace = self._take_workspace()
        is_draft = chunk.given is not None
        try:
            with forward_with(self.stream, chunk.token_ids, is_draft=is_draft):
                self._fill_step(workspace, chunk)
                result = self._run(workspace, chunk, logits)
                chunk.cache.commit_staged(workspace.step, chunk.count)
        finally:
            self._free[:] = [workspace]
        return result

    def _take_workspace(self) -> _Workspace:
        try:
            return self._free.pop()
        except IndexError:
            return _Workspace(new_run(self.threads, is_pinned=self._is_pinned))

    def _fill_step(self, workspace: _Workspace, chunk: _Chunk) -> None:
        lib, ffi = library()
        step, cache, hooks, count = workspace.step, chunk.cache, chunk.hooks, chunk.count
        run = workspace.run
        run.should_stop = hooks.should_stop
        run.cdata.is_small = count <= DK_SMALL_TOKENS
        run.cdata.bad = 0
        step.start = cache.length
        step.tokens = count
        step.token_ids = pointer(chunk.token_ids)
        step.streams = pointer(chunk.streams)
        step.staged_bytes = cache.staged_bytes
        step.keys = (cache.length + count) // OVERLAP_RATIO
        step.pauses_at_selection = hooks.on_topk is not None
        is_resident = self.experts.is_resident
        is_watched = hooks.on_experts is not None or hooks.on_guesses is not None
        step.pauses_at_experts = is_watched or not is_resident
        step.experts = ffi.NULL if is_resident else workspace.own_records(self.config.num_experts)
        workspace.watch_scores(count if hooks.on_topk is not None else 0)
        workspace.reserve(
            lib.dk_workspace_bytes(
                self.network.cdata, count, step.keys, cache.staged_bytes, self.threads
            )
        )

    def _run(self, workspace: _Workspace, chunk: _Chunk, logits: LogitRows) -> Forward:
        lib, _ = library()
        network, run, step = self.network, workspace.run, workspace.step
        chunk.hooks.check_stop()
        if self.experts.is_resident:
            self.experts.check_unchanged()
        if chunk.given is None:
            run.check(lib.dk_begin(run.cdata, network.cdata, step))
        else:
            given = pointer(chunk.given)
            entrance = network.draft_entrance
            run.check(lib.dk_begin_draft(run.cdata, network.cdata, entrance, step, given))
        layers, states = chunk.layers, chunk.cache.states
        while status := lib.dk_layers(
            run.cdata, network.cdata, layers.cdata, states, layers.count, step
        ):
            if status != _PAUSED:
                run.check(status)
            self._attend_to_pause(workspace, chunk)
        if not lib.dk_all_finite(step.streams, chunk.streams.numel()):
            raise broken_streams(chunk.streams, chunk.cache.length)
        if run.cdata.bad:
            raise broken_rows(chunk.cache.length, chunk.cache.length + chunk.count)
        return Forward(self._native_logits(workspace, chunk, logits), chunk.streams)

    def _native_logits(
        self, workspace: _Workspace, chunk: _Chunk, rows: LogitRows
    ) -> Tensor | None:
        if rows == "none":
            return None
        lib, _ = library()
        run, step = workspace.run, workspace.step
        count = chunk.count if rows == "all" else 1
        result = torch.empty((count, self.config.vocab_size))
        out, first = pointer(result), chunk.count - count
        run.check(lib.dk_head(run.cdata, self.network.cdata, chunk.head, step, out, first, count))
        if not lib.dk_all_finite(out, result.numel()):
            raise broken_logits()
        return result

    # ---- pauses ----

    def _attend_to_pause(self, workspace: _Workspace, chunk: _Chunk) -> None:
        chunk.hooks.check_stop()
        step = workspace.step
        if step.phase == _AFTER_SELECTION:
            self._show_selection(workspace, chunk)
            return
        plan = chunk.layers.plans[step.layer]
        if chunk.hooks.on_experts is not None:
            self._show_experts(workspace, chunk, plan)
        if chunk.hooks.on_guesses is not None and chunk.has_router_after(step.layer):
            most = min(chunk.hooks.guesses, self.config.num_experts, MOST_GUESSES)
            chunk.hooks.on_guesses(plan.layer + 1, self._guesses(workspace, chunk, most).long())
        used = workspace.used_experts(chunk.count * self.config.experts_per_token)
        if self.stream is not None:
            self._compute_batches(self.stream, workspace, chunk, used)
            return
        records = chunk.layers.experts[step.layer]
        if self.experts.is_resident:
            used = [expert for expert in used if not records[3 * expert].data]
            if not used:
                return
            fetched = self.experts.fetch(plan.layer, used)
            self._kept.append(fetched)
        else:
            records = step.experts
            fetched = workspace.fetched = self.experts.fetch(plan.layer, used)
        self.network.set_experts(records, used, fetched, is_shared=self.experts.is_resident)

    def _compute_batches(
        self, stream: ExpertStream, workspace: _Workspace, chunk: _Chunk, used: Sequence[int]
    ) -> None:
        """Compute a layer's experts as they arrive; all at once are left to `dk_layers`."""
        lib, _ = library()
        run, step, layers = workspace.run, workspace.step, chunk.layers
        layer = layers.plans[step.layer].layer
        batches = stream.stream(layer, used, chunk.count, chunk.hooks.check_stop)
        for place, batch in enumerate(batches):
            if place == 0:  # what this layer asks for is being read by now
                self._tell_guesses(workspace, chunk)
            for expert_id, expert in batch:
                self._described.copy_to(step.experts + 3 * expert_id, expert)
            if len(batch) == len(used) and not step.parts:
                return
            with workspace.choosing(batch) as chosen:
                network = self.network.cdata
                run.check(lib.dk_layer_part(run.cdata, network, layers.cdata, step, chosen))

    def _tell_guesses(self, workspace: _Workspace, chunk: _Chunk) -> None:
        """Guess for the layer after the one at hand, if anybody wants that."""
        step, foresight = workspace.step, self._foresight
        if foresight is None or not chunk.has_router_after(step.layer):
            return
        layer = chunk.layers.plans[step.layer + 1].layer
        most = min(foresight.guesses_wanted(layer, chunk.count), self.config.num_experts)
        if most:
            foresight.guess(layer, likeliest_first(self._guesses(workspace, chunk, most)))

    def _guesses(self, workspace: _Workspace, chunk: _Chunk, most: int) -> Tensor:
        """[T, most] int32 for the next layer, the likeliest first; the router's logits are lost."""
        lib, _ = library()
        ids = torch.empty((chunk.count, most), dtype=torch.int32)
        run, network, step = workspace.run, self.network.cdata, workspace.step
        layers = chunk.layers.cdata
        run.check(lib.dk_layer_guess(run.cdata, network, layers, step, pointer(ids), most))
        return ids

    def _show_selection(self, workspace: _Workspace, chunk: _Chunk) -> None:
        on_topk, step = chunk.hooks.on_topk, workspace.step
        if on_topk is None or workspace.scores is None:
            return
        selected = workspace.tensor(step.selected, (chunk.count, self.config.index_topk))
        layer = chunk.layers.plans[step.layer].layer
        ids = ascending(on_topk(layer, workspace.scores, selected.to(torch.int64)))
        if int(ids.min()) < -1 or int(ids.max()) >= step.keys or ids.shape[1] > selected.shape[1]:
            raise ConfigError(
                f"on_topk must give at most {selected.shape[1]} of {step.keys} rows per token,"
                f" found {list(ids.shape)}, {int(ids.min())}..{int(ids.max())}"
            )
        selected.fill_(-1)
        selected[:, : ids.shape[1]] = ids

    def _show_experts(self, workspace: _Workspace, chunk: _Chunk, plan: LayerPlan) -> None:
        lib, _ = library()
        ids = workspace.tensor(workspace.step.ids, (chunk.count, self.config.experts_per_token))
        on_experts, step, experts = chunk.hooks.on_experts, workspace.step, self.config.num_experts
        if on_experts is None:
            return
        logits = workspace.tensor(step.logits, (chunk.count, experts), torch.float32)
        bias = chunk.layers.weights[step.layer].moe.bias
        scores = router_scores(logits, backend="reference")
        wanted = on_experts(plan.layer, scores if bias is None else scores + bias, ids.long())
        if wanted.shape != ids.shape or int(wanted.min()) < 0 or int(wanted.max()) >= experts:
            raise ConfigError(
                f"on_experts must give {list(ids.shape)} of {experts} experts, found"
                f" {list(wanted.shape)}, {int(wanted.min())}..{int(wanted.max())}"
            )
        ids.copy_(wanted)
        workspace.run.check(
            lib.dk_route_weights(
                workspace.run.cdata,
                step.weights,
                step.logits,
                step.ids,
                chunk.count,
                experts,
                ids.shape[1],
                self.config.routed_scale,
            )
        )


class _Workspace:
    """Working memory of one forward at a time, with the records that C code reads and writes."""

    def __init__(self, run: NativeRun) -> None:
        _, ffi = library()
        self.run = run
        self.step = ffi.new("dk_step *")
        self.scores: Tensor | None = None
        """[T, keys] scores of the layer at hand, when a hook watches."""
        self.fetched: Sequence[ExpertWeights] = ()
        """Experts of the layer at hand, kept alive."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._records: Any = None
        self._chosen: Any = None

    def reserve(self, nbytes: int) -> None:
        """Have at least so many bytes, aligned, at `step.workspace`."""
        if self._memory.numel() < nbytes + _ALIGNMENT:
            _, ffi = library()
            self._memory = torch.empty(0, dtype=torch.uint8)  # gone before the larger one comes
            # Some to spare: index scores grow with the timeline.
            self._memory = torch.empty(nbytes + nbytes // 16 + _ALIGNMENT, dtype=torch.uint8)
            address = -(-self._memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
            self.step.workspace = ffi.cast("uint8_t *", address)

    def watch_scores(self, count: int) -> None:
        """Have room for the index scores of `count` tokens; none for 0."""
        _, ffi = library()
        self.scores = torch.empty((count, self.step.keys)) if count else None
        self.step.scores = pointer(self.scores) if count else ffi.NULL

    def own_records(self, experts: int) -> Any:
        """Expert records that only this forward uses."""
        _, ffi = library()
        if self._records is None:
            self._records = ffi.new("dk_matrix[]", 3 * experts)
            self._chosen = ffi.new("uint8_t[]", experts)
        return self._records

    def used_experts(self, pairs: int) -> list[int]:
        """Ids that the tokens chose at this layer, each once, ascending."""
        _, ffi = library()
        return sorted(set(ffi.unpack(self.step.ids, pairs)))

    @contextmanager
    def choosing(self, batch: Sequence[tuple[int, ExpertWeights]]) -> Iterator[Any]:
        """Marks of some experts, for one call."""
        try:
            for expert_id, _ in batch:
                self._chosen[expert_id] = 1
            yield self._chosen
        finally:
            for expert_id, _ in batch:
                self._chosen[expert_id] = 0

    @staticmethod
    def tensor(address: Any, shape: tuple[int, int], dtype: torch.dtype = torch.int32) -> Tensor:
        """A view of C memory that is being lent."""
        _, ffi = library()
        nbytes = shape[0] * shape[1] * dtype.itemsize
        return torch.frombuffer(ffi.buffer(address, nbytes), dtype=dtype).view(shape)
