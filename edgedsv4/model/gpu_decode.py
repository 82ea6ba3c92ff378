"""One decoded token on a GPU: the launches of a step in their order, captured as one graph.

Every address and every launch is the same for all positions of a timeline; what differs (token,
position, counts of rows) is read from memory by the kernels. So a step is recorded once per
timeline and replayed; where the device has no graphs, the same launches are issued one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgedsv4.kernels._triton import IS_INTERPRETED
from edgedsv4.kernels.gpu.attention import decode_attention, decode_partials, decode_splits
from edgedsv4.kernels.gpu.finish_queries import IndexQueries, Rotation, finish_queries
from edgedsv4.kernels.gpu.gated import gated
from edgedsv4.kernels.gpu.gather_rows import embed_streams
from edgedsv4.kernels.gpu.hyper import head_step, hyper_step, hyper_work_floats
from edgedsv4.kernels.gpu.index_scores import score_keys
from edgedsv4.kernels.gpu.index_select import select_rows, select_scratch_ints
from edgedsv4.kernels.gpu.matvec import matvec
from edgedsv4.kernels.gpu.nvidia import overlaps
from edgedsv4.kernels.gpu.prepare import InputProducts, RowPositions, prepare
from edgedsv4.kernels.gpu.route import route
from edgedsv4.kernels.gpu.sample import argmax, argmax_work_ints
from edgedsv4.kernels.mhc import HyperConstants
from edgedsv4.model.gpu_layer_state import LayerState, layer_state
from edgedsv4.model.gpu_token_experts import ChosenExperts, rounded_input, token_experts
from edgedsv4.model.layer_plan import OVERLAP_RATIO

if TYPE_CHECKING:
    from edgedsv4.kernels.gpu.attention_rows import Parts
    from edgedsv4.kernels.gpu.byte_vector import ByteVector
    from edgedsv4.kernels.gpu.planes import DeviceMatrix
    from edgedsv4.model.gpu_buffers import StepBuffers, StepPlace
    from edgedsv4.model.gpu_cache import GpuKvCache
    from edgedsv4.model.gpu_chunk import ForwardSetting
    from edgedsv4.model.gpu_network import DeviceHyper, DeviceLayer, DeviceNetwork

_WARM_UPS = 2
NEAR_ROWS = 32_768
"""Compressed rows up to which a step of its own selects: with few launches, of few programs."""


class DecodeStep:
    """Evaluates one token of one timeline.

    Args:
        setting: what all steps of the model have in common.
        network: its weights.
        cache: the timeline.
        place: token and position, shared by all timelines of the model.
        buffers: activations, shared likewise.
    """

    def __init__(
        self,
        setting: ForwardSetting,
        network: DeviceNetwork,
        cache: GpuKvCache,
        place: StepPlace,
        buffers: StepBuffers,
    ) -> None:
        config = self._config = setting.config
        self._hybrid = network.hybrid
        self._network = network
        self._place = place
        self._buffers = buffers
        self._family = setting.family
        self._overlap = overlaps(setting.family) and self._is_graph() and network.hybrid is None
        self._rounds = not setting.is_precise
        """Profile `default`: index queries are rounded as keys are, and inputs of routed experts to
        bytes where there are kernels for it."""
        self._states = [layer_state(config, layer, cache) for layer in network.layers]
        device = buffers.x.device
        self._constants = HyperConstants(
            config.hc_sinkhorn_iterations, config.hc_eps, config.rms_norm_eps
        )
        heads, dim = config.num_heads, config.head_dim
        splits = decode_splits(_multiprocessors(device), heads)
        self._partials = decode_partials(splits, heads, dim, device)
        self._work = torch.empty(hyper_work_floats(1, config.hidden_size), device=device)
        capacity = max((state.keys[0].shape[0] for state in self._states if state.keys), default=0)
        self._scores = torch.empty((1, capacity), device=device)
        near = (NEAR_ROWS,) if capacity > NEAR_ROWS else ()
        self._row_limits = (0, *near, capacity) if capacity > config.index_topk else (0,)
        ints = select_scratch_ints(1, capacity, config.index_topk)
        self._select_scratch = torch.zeros(ints, dtype=torch.int32, device=device)
        self._best_work = torch.empty(
            argmax_work_ints(1, config.vocab_size), dtype=torch.int32, device=device
        )
        self._side: Any = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: dict[int, Any] = {}
        """By how many rows there may be to select from."""

    def run(self, position: int, check_stop: Callable[[], None] | None = None) -> None:
        """Evaluate the token at `StepPlace.given`; returns before the device is done.

        The rows of the token enter the rings, its logits `StepBuffers.logits`.

        Args:
            position: as the device was told. Where every layer attends to all compressed rows
                there are, the step without an indexer does; where there are few, one that selects
                from no more. All are recorded at once.
            check_stop: called while experts of a drive are waited for, by any thread; raises to
                stop.
        """
        if self._hybrid is not None:
            self._hybrid.begin_token(check_stop)
        if not self._graphs and self._is_graph():
            self._graphs = {rows: self._capture(rows) for rows in reversed(self._row_limits)}
        seen, topk = (position + 1) // OVERLAP_RATIO, self._config.index_topk
        fitting = (limit for limit in self._row_limits if seen <= max(limit, topk))
        rows = next(fitting, self._row_limits[-1])  # there may be no layer that selects
        if self._graphs:
            self._graphs[rows].replay()
        else:
            self._launch(rows)

    def _is_graph(self) -> bool:
        """Whether the step can be recorded."""
        can_be_captured = self._hybrid is None or self._hybrid.can_be_captured
        return can_be_captured and _has_graphs(self._buffers.x.device)

    def _capture(self, rows: int) -> Any:
        """Record the step. Warming up evaluates the token, which evaluating again changes not."""
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._launch(rows)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._launch(rows)
        return graph

    def _launch(self, rows: int) -> None:
        buffers, network, place = self._buffers, self._network, self._place
        place.launch(buffers.bad)
        embed_streams(buffers.streams, place.token_ids, network.embed)
        o: Tensor | None = None
        extra: Tensor | None = None
        other: Tensor | None = None
        for layer, state in zip(network.layers, self._states, strict=True):
            self._hyper(layer.hc_attn, layer.attn_norm, o, (extra, other))
            self._attention(layer, state, rows)
            rounded = self._rounded_input(layer)
            self._hyper(layer.hc_ffn, layer.ffn_norm, buffers.o, rounded=rounded)
            with self._aside():
                self._shared(layer)
            o, other = self._experts(layer, rounded)
            self._join()
            extra = buffers.shared if layer.shared_w2 is not None else None
        head = network.hc_head
        head_step(
            buffers.y,
            buffers.streams,
            o,
            buffers.post,
            buffers.comb,
            fn=head.fn,
            base=head.base,
            scale=head.scale,
            norm=network.norm,
            constants=self._constants,
            work=self._work,
            extra=extra,
            overlap=self._overlap,
            other=other,
        )
        self._matvec(buffers.logits, buffers.y, [network.head])
        argmax(buffers.best, buffers.logits, self._best_work)

    def _hyper(
        self,
        hyper: DeviceHyper,
        norm: Tensor,
        o: Tensor | None,
        additions: tuple[Tensor | None, Tensor | None] = (None, None),
        rounded: ByteVector | None = None,
    ) -> None:
        buffers, (extra, other) = self._buffers, additions
        hyper_step(
            buffers.x,
            buffers.post,
            buffers.comb,
            buffers.streams,
            o,
            fn=hyper.fn,
            base=hyper.base,
            scale=hyper.scale,
            norm=norm,
            constants=self._constants,
            work=self._work,
            extra=extra,
            rounded=rounded,
            overlap=self._overlap,
            other=other,
        )

    def _rounded_input(self, layer: DeviceLayer) -> ByteVector | None:
        """Place for the input of the routed experts as bytes, where those are multiplied so."""
        is_elsewhere = self._hybrid is not None and not self._hybrid.has_tokens_on_card
        if not self._rounds or (layer.placed is not None and is_elsewhere):
            return None
        return rounded_input(layer.experts, self._buffers, self._family)

    def _attention(self, layer: DeviceLayer, state: LayerState, rows: int) -> None:
        buffers, place, plan, config = self._buffers, self._place, layer.plan, self._config
        made = buffers.entrance[:, : layer.entrance.width]
        self._matvec(made, buffers.x, layer.entrance.matrices)
        columns = layer.entrance.columns
        cos, sin = place.rotation(plan.rope)
        window_cos, window_sin = place.rotation(plan.rope, plan.ratio)
        has_compressor, has_indexer = layer.compressor is not None, layer.indexer is not None
        products = InputProducts(
            qr=made[:, columns["qr"]],
            kv=made[:, columns["kv"]],
            compressor=(made[:, columns["values"]], made[:, columns["gates"]])
            if has_compressor
            else None,
            indexer=(made[:, columns["index_values"]], made[:, columns["index_gates"]])
            if has_indexer
            else None,
        )
        positions = RowPositions(
            position=place.position,
            cos=cos,
            sin=sin,
            window_cos=window_cos,
            window_sin=window_sin,
            bad=buffers.bad,
        )
        prepare(buffers.qr, products, state.attention, positions, overlap=self._overlap)
        selects = rows > 0 and has_indexer
        matrices = layer.queries.matrices if selects else layer.queries.matrices[:1]
        queries = buffers.queries[:, : sum(matrix.rows for matrix in matrices)]
        self._matvec(queries, buffers.qr, matrices)
        q = queries[:, layer.queries.columns["q"]].view(1, config.num_heads, config.head_dim)
        keys = None
        if selects and state.keys is not None:
            keys = tuple(part[:rows] for part in state.keys)
        self._finish(layer, queries, q, made, keys)
        decode_attention(
            buffers.attended,
            q,
            state.attention.window,
            place.position,
            window=config.window,
            compressed=state.compressed,
            selected=buffers.selected if selects else None,
            ratio=plan.ratio,
            sink=layer.sink,
            cos=cos,
            sin=sin,
            partials=self._partials,
            family=self._family,
            overlap=self._overlap,
        )
        self._matvec(buffers.grouped, buffers.attended, [layer.wo_a], config.output_groups)
        self._matvec(buffers.o, buffers.grouped, [layer.wo_b])

    def _finish(
        self,
        layer: DeviceLayer,
        queries: Tensor,
        q: Tensor,
        made: Tensor,
        keys: Parts | None,
    ) -> None:
        """Queries ready for use, and with the keys of an indexer the selected rows."""
        buffers, place, config = self._buffers, self._place, self._config
        cos, sin = place.rotation(layer.plan.rope)
        rotation = Rotation(cos=cos, sin=sin)
        overlap = self._overlap
        if keys is None:
            finish_queries(q, q, rotation, config.rms_norm_eps, overlap=overlap)
            return
        shape = (1, config.index_heads, config.index_dim)
        iq = queries[:, layer.queries.columns["iq"]].view(shape)
        index = IndexQueries(out=iq, raw=iq, is_rounded=self._rounds, bad=buffers.bad)
        finish_queries(q, q, rotation, config.rms_norm_eps, index, overlap=overlap)
        ratio, position = layer.plan.ratio, place.position
        scores = self._scores[:, : keys[0].shape[0]]
        score_keys(
            scores,
            iq,
            made[:, layer.entrance.columns["index_weights"]],
            keys,
            position,
            ratio=ratio,
            topk=config.index_topk,
            factor=(config.index_dim * config.index_heads) ** -0.5,
            overlap=overlap,
        )
        work, bad = self._select_scratch, buffers.bad
        select_rows(buffers.selected, scores, position, work, bad, ratio=ratio, overlap=overlap)

    def _experts(
        self, layer: DeviceLayer, rounded: ByteVector | None
    ) -> tuple[Tensor, Tensor | None]:
        """The routed experts: one or two tensors to be added."""
        buffers = self._buffers
        self._matvec(buffers.router, buffers.x, [layer.router])
        route(
            buffers.expert_ids,
            buffers.expert_weights,
            buffers.router,
            layer.bias,
            scale=self._config.routed_scale,
            table=layer.expert_table,
            token_ids=self._place.token_ids,
            overlap=self._overlap,
        )
        if self._hybrid is not None and layer.placed is not None:
            return self._hybrid.token(layer, layer.placed, buffers, rounded, self._family)
        slots, weights = buffers.expert_ids[0], buffers.expert_weights[0]
        chosen = ChosenExperts(layer.experts, slots, weights)
        how: dict[str, Any] = {"family": self._family, "overlap": self._overlap}
        token_experts(chosen, layer.plan.swiglu_limit, buffers, rounded, **how)
        return buffers.o, None

    def _shared(self, layer: DeviceLayer) -> None:
        """The shared expert, beside the routed ones: those leave memory bandwidth unused."""
        w1, w3, w2 = layer.shared_w1, layer.shared_w3, layer.shared_w2
        if w1 is None or w3 is None or w2 is None:
            return
        buffers = self._buffers
        self._matvec(buffers.shared_both, buffers.x, (w1, w3))
        gated(buffers.shared_inner, buffers.shared_both, layer.plan.shared_swiglu_limit)
        self._matvec(buffers.shared, buffers.shared_inner, (w2,))

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Launch on a second stream; `_join` waits for it."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def _join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)

    def _matvec(
        self, y: Tensor, x: Tensor, matrices: Sequence[DeviceMatrix], groups: int = 1
    ) -> None:
        matvec(y, x, matrices, groups, family=self._family, overlap=self._overlap)


def _has_graphs(device: torch.device) -> bool:
    return device.type == "cuda" and not IS_INTERPRETED


def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).max_compute_units)
    return 8
