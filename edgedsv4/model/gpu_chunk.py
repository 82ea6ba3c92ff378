"""A chunk of tokens on a GPU: the same steps as one token, with kernels for many.

Rows that go into the rings are staged and enter them when the whole chunk is known to be sound.
Launches run ahead of the device; whoever may want to stop is asked at every layer, and the host
never gets more than a few layers ahead, so that stopping does not wait for the whole chunk.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgedsv4.errors import ConfigError
from edgedsv4.kernels.gpu.chunk_attention import chunk_attention, wants_wide_rows
from edgedsv4.kernels.gpu.expert_matmul import expert_ffn_chunk, expert_scratch
from edgedsv4.kernels.gpu.expert_scaled import fits_scaled
from edgedsv4.kernels.gpu.finish_queries import IndexQueries, Rotation, finish_queries
from edgedsv4.kernels.gpu.hyper import head_step, hyper_step, hyper_work_floats
from edgedsv4.kernels.gpu.index_scores import score_keys, tokens_per_tile
from edgedsv4.kernels.gpu.index_select import select_rows, select_scratch_ints
from edgedsv4.kernels.gpu.matmul import matmul, matmul_scratch_bytes
from edgedsv4.kernels.gpu.prepare import InputProducts, RowPositions
from edgedsv4.kernels.gpu.prepare_chunk import StagedRows, prepare_chunk
from edgedsv4.kernels.gpu.rings import commit_rings, read_rings
from edgedsv4.kernels.gpu.route import route
from edgedsv4.kernels.mhc import HyperConstants
from edgedsv4.kernels.rope import rope_frequencies, rope_table
from edgedsv4.kernels.router import router_scores, routing_weights
from edgedsv4.kernels.swiglu import swiglu
from edgedsv4.model.gpu_layer_state import LayerState, layer_state
from edgedsv4.model.indexer import ascending
from edgedsv4.model.scaled_experts import ScaledExperts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgedsv4.config import ModelConfig
    from edgedsv4.kernels.gpu.planes import DeviceMatrix
    from edgedsv4.model.gpu_cache import GpuKvCache
    from edgedsv4.model.gpu_hybrid import HybridExperts
    from edgedsv4.model.gpu_network import DeviceHyper, DeviceLayer, Products
    from edgedsv4.model.hooks import ForwardHooks
    from edgedsv4.model.layer_plan import LayerPlan

SCORE_BYTES = 256 << 20
"""Bound of the index scores of one tile of tokens."""
_LAYERS_AHEAD = 3
"""Layers whose launches may wait in the device's queue."""
_FLOAT_TYPES = frozenset(("BF16", "F16", "F32"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSetting:
    """What all forwards of a model have in common."""

    config: ModelConfig
    device: torch.device
    family: str
    is_precise: bool
    """Profile `exact`: products in float32, inputs of products as they are."""
    hybrid: HybridExperts | None = None
    """Computes routed experts that are not all on the device."""
    scaled: ScaledExperts = field(default_factory=ScaledExperts)


class Chunk:
    """T tokens at positions start .. start + T - 1.

    Args:
        setting: of the model.
        layers: those the tokens go through.
        cache: the timeline.
        token_ids: [T] int64 on the device.
        hooks: watch, steer or stop.
    """

    def __init__(
        self,
        setting: ForwardSetting,
        layers: Sequence[DeviceLayer],
        cache: GpuKvCache,
        token_ids: Tensor,
        hooks: ForwardHooks,
    ) -> None:
        self._setting = setting
        self._layers = layers
        self._states = [layer_state(setting.config, layer, cache) for layer in layers]
        self._ids = token_ids
        self._hooks = hooks
        self.start, self.count = cache.length, int(token_ids.shape[0])
        device = setting.device
        self._position = torch.full((1,), self.start, dtype=torch.int32, device=device)
        self._constants = HyperConstants(
            setting.config.hc_sinkhorn_iterations,
            setting.config.hc_eps,
            setting.config.rms_norm_eps,
        )
        floats = hyper_work_floats(self.count, setting.config.hidden_size)
        self._work = self._floats(floats)
        self._post = self._floats(self.count, setting.config.hc_streams)
        self._comb = self._floats(self.count, setting.config.hc_streams, setting.config.hc_streams)
        self._x = self._floats(self.count, setting.config.hidden_size)
        self._tables: dict[tuple[Any, int], tuple[Tensor, Tensor]] = {}
        self._staged: list[list[tuple[Tensor, Tensor]]] = []
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)
        self._experts: Any = None
        self.bad = torch.zeros(1, dtype=torch.int32, device=device)
        """Set by kernels that saw a value that is not finite."""

    def run(self, streams: Tensor) -> Tensor:
        """Carry streams [T, hc, D] float32 through the layers, in place; what the last one gave.

        That output, [T, D], is not in the streams yet: `head` writes it.

        Raises:
            CancelledError: if a hook said so; the timeline is as it was.
        """
        hybrid = self._setting.hybrid
        if hybrid is None:
            return self._run(streams)
        hybrid.begin_chunk(self._layers, self.count, self._hooks.check_stop)
        try:
            return self._run(streams)
        finally:
            hybrid.end_chunk()

    def _run(self, streams: Tensor) -> Tensor:
        o: Tensor | None = None
        waiting: deque[Any] = deque()
        for layer, state in zip(self._layers, self._states, strict=True):
            self._hooks.check_stop()
            self._hyper(layer.hc_attn, layer.attn_norm, streams, o)
            o = self._attention(layer, state)
            self._hyper(layer.hc_ffn, layer.ffn_norm, streams, o)
            o = self._experts_of(layer)
            self._wait_for_device(waiting)
        if o is None:
            raise ConfigError("a model needs a layer")
        return o

    def head(
        self, streams: Tensor, o: Tensor, rows: int, hyper: DeviceHyper, norm: Tensor
    ) -> Tensor:
        """Write the last output to the streams; [rows, D] that the head sees of the last tokens."""
        y = self._floats(rows, self._setting.config.hidden_size)
        head_step(
            y,
            streams,
            o,
            self._post,
            self._comb,
            fn=hyper.fn,
            base=hyper.base,
            scale=hyper.scale,
            norm=norm,
            constants=self._constants,
            work=self._work,
            precise=self._setting.is_precise,
        )
        return y

    def product(self, x: Tensor, matrix: DeviceMatrix, *, groups: int = 1) -> Tensor:
        """[T, N] float32."""
        y = self._floats(x.shape[0], matrix.rows)
        self._multiply(y, x, matrix, groups)
        return y

    def commit(self) -> None:
        """Let the staged rows into the rings."""
        for rings in self._staged:
            commit_rings(rings, self._position, self.count)

    # ---- parts of a layer ----

    def _hyper(self, hyper: DeviceHyper, norm: Tensor, streams: Tensor, o: Tensor | None) -> None:
        hyper_step(
            self._x,
            self._post,
            self._comb,
            streams,
            o,
            fn=hyper.fn,
            base=hyper.base,
            scale=hyper.scale,
            norm=norm,
            constants=self._constants,
            work=self._work,
            precise=self._setting.is_precise,
        )

    def _attention(self, layer: DeviceLayer, state: LayerState) -> Tensor:
        config, plan = self._setting.config, layer.plan
        made = self._products(self._x, layer.entrance)
        qr = self._floats(self.count, config.q_lora_rank)
        window, old = self._rows(layer, state, made, qr)
        q, iq = self._queries(layer, state, qr)
        selected = None if iq is None else self._select(layer, state, iq, made)
        cos, sin = self._table(plan, 0)
        attended = torch.empty(q.flatten(1).shape, dtype=q.dtype, device=q.device)
        chunk_attention(
            attended,
            q,
            window,
            first=self.start - old,
            position=self._position,
            window=config.window,
            compressed=state.compressed,
            selected=selected,
            ratio=plan.ratio,
            sink=layer.sink,
            cos=cos,
            sin=sin,
            wide=self._wide_rows(plan, state, window),
            family=self._setting.family,
        )
        grouped = self.product(attended, layer.wo_a, groups=config.output_groups)
        return self.product(grouped, layer.wo_b)

    def _wide_rows(
        self, plan: LayerPlan, state: LayerState, window: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor | None] | None:
        """Room for the rows that the chunk sees in bfloat16, where decoding them once pays."""
        seen = 0 if state.compressed is None else plan.visible_rows(self.start + self.count)
        family = self._setting.family
        if self._setting.is_precise or not wants_wide_rows(self.count, seen, family):
            return None

        def rows(count: int) -> Tensor:
            shape = (count, self._setting.config.head_dim)
            return torch.empty(shape, dtype=torch.bfloat16, device=self._setting.device)

        return rows(window[0].shape[0]), rows(seen) if seen else None

    def _rows(
        self, layer: DeviceLayer, state: LayerState, made: Tensor, qr: Tensor
    ) -> tuple[tuple[Tensor, ...], int]:
        """Make the rows of the chunk; window rows, old ones first, and how many those are."""
        plan, attention = layer.plan, state.attention
        old = min(self._setting.config.window - 1, self.start)
        window = tuple(
            torch.empty((old + self.count, *part.shape[1:]), dtype=part.dtype, device=part.device)
            for part in attention.window
        )
        if old:
            pairs = zip(window, attention.window, strict=True)
            read_rings([(rows[:old], ring) for rows, ring in pairs], self._position)
        parts = [part for part in (attention.compressor, attention.indexer) if part is not None]
        kept = min(self.count, min((part.ring.shape[0] for part in parts), default=0))
        raw = [self._floats(kept, part.ring.shape[1]) for part in parts]
        fresh = tuple(rows[old:] for rows in window)
        staged = StagedRows(
            window=fresh,
            compressor=raw[0] if parts else None,
            indexer=raw[1] if len(parts) > 1 else None,
        )
        cos, sin = self._table(plan, 0)
        window_cos, window_sin = self._table(plan, plan.ratio)
        positions = RowPositions(
            position=self._position,
            cos=cos,
            sin=sin,
            window_cos=window_cos,
            window_sin=window_sin,
            bad=self.bad,
        )
        prepare_chunk(qr, staged, _input_products(layer, made), attention, positions)
        rings = list(zip(attention.window, fresh, strict=True))
        rings += [(part.ring, rows) for part, rows in zip(parts, raw, strict=True)]
        self._staged.append(rings)
        return window, old

    def _queries(
        self, layer: DeviceLayer, state: LayerState, qr: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Queries [T, H, d], and those of the indexer unless every token takes all it sees."""
        config, plan = self._setting.config, layer.plan
        raw = self.product(qr, layer.queries.matrices[0])
        raw = raw.view(self.count, config.num_heads, config.head_dim)
        q = raw if self._setting.is_precise else torch.empty_like(raw, dtype=torch.bfloat16)
        cos, sin = self._table(plan, 0)
        index = None
        if (
            state.keys is not None
            and plan.visible_rows(self.start + self.count) > config.index_topk
        ):
            raw_iq = self.product(qr, layer.queries.matrices[1])
            raw_iq = raw_iq.view(self.count, config.index_heads, config.index_dim)
            index = IndexQueries(out=raw_iq, raw=raw_iq, is_rounded=state.is_rounded, bad=self.bad)
        finish_queries(q, raw, Rotation(cos=cos, sin=sin), config.rms_norm_eps, index)
        return q, None if index is None else index.out

    def _select(self, layer: DeviceLayer, state: LayerState, iq: Tensor, made: Tensor) -> Tensor:
        config, plan, keys = self._setting.config, layer.plan, state.keys
        if keys is None:
            raise ConfigError("a layer without an indexer selects nothing")
        factor = (config.index_dim * config.index_heads) ** -0.5
        weights = made[:, layer.entrance.columns["index_weights"]] * factor
        rows = plan.visible_rows(self.start + self.count)
        selected = torch.empty(
            (self.count, config.index_topk), dtype=torch.int32, device=self._setting.device
        )
        tile = tokens_per_tile(self.count, rows, SCORE_BYTES)
        hook = self._hooks.on_topk
        if hook is not None:
            tile = self.count
        scores = self._floats(tile, -(-rows // 16) * 16)
        ints = select_scratch_ints(tile, rows, config.index_topk)
        scratch = torch.zeros(ints, dtype=torch.int32, device=self._setting.device)
        seen = tuple(part[:rows] for part in keys)
        for first in range(0, self.count, tile):
            part = slice(first, min(first + tile, self.count))
            here = scores[: part.stop - first]
            score_keys(
                here,
                iq[part],
                weights[part],
                seen,
                self._position,
                ratio=plan.ratio,
                topk=config.index_topk,
                first=first,
                family=self._setting.family,
            )
            select_rows(
                selected[part],
                here,
                self._position,
                scratch,
                self.bad,
                ratio=plan.ratio,
                first=first,
            )
        if hook is not None:
            positions = torch.arange(self.start, self.start + self.count, device=iq.device)
            entries = torch.arange(rows, device=iq.device)
            hidden = entries >= ((positions + 1) // plan.ratio)[:, None]
            wanted = hook(
                plan.layer, scores[:, :rows].masked_fill(hidden, -torch.inf), selected.long()
            )
            wanted = ascending(wanted.to(selected.device)).int()
            selected.fill_(-1)
            selected[:, : wanted.shape[1]] = wanted
        return selected

    def _experts_of(self, layer: DeviceLayer) -> Tensor:
        config, plan = self._setting.config, layer.plan
        logits = self.product(self._x, layer.router)
        shape = (self.count, config.experts_per_token)
        ids = torch.empty(shape, dtype=torch.int32, device=self._setting.device)
        factors = self._floats(*shape)
        route(
            ids,
            factors,
            logits,
            layer.bias,
            scale=config.routed_scale,
            table=layer.expert_table,
            token_ids=self._ids,
        )
        hook = self._hooks.on_experts
        if hook is not None:
            scores = router_scores(logits, backend="reference")
            biased = scores if layer.bias is None else scores + layer.bias
            wanted = hook(plan.layer, biased, ids.long()).to(ids.device)
            ids.copy_(wanted)
            factors.copy_(routing_weights(scores, wanted, config.routed_scale, backend="reference"))
        out = self._floats(self.count, config.hidden_size)
        if self._experts is None:
            self._experts = expert_scratch(
                self.count,
                config.experts_per_token,
                config.num_experts,
                config.hidden_size,
                config.expert_width,
                device=self._setting.device,
                precise=self._setting.is_precise,
            )
        self._routed(out, ids, factors, layer)
        if layer.shared_w1 is not None and layer.shared_w2 is not None:
            out += self._shared(layer)
        return out

    def _routed(self, out: Tensor, ids: Tensor, factors: Tensor, layer: DeviceLayer) -> None:
        """The sum of the routed experts, by the product that card and weights have."""
        setting, banks = self._setting, layer.experts.matrices
        chosen, limit, scratch = (self._x, ids, factors), layer.plan.swiglu_limit, self._experts
        precise = setting.is_precise
        if setting.hybrid is not None and layer.placed is not None:
            placed = layer.placed
            setting.hybrid.chunk(out, chosen, layer, placed, scratch, precise=precise)
        elif fits_scaled(banks, setting.family, precise):
            setting.scaled.run(out, chosen, banks, limit, scratch)
        else:
            expert_ffn_chunk(out, *chosen, banks, limit, scratch=scratch, precise=precise)

    def _shared(self, layer: DeviceLayer) -> Tensor:
        w1, w3, w2 = layer.shared_w1, layer.shared_w3, layer.shared_w2
        if w1 is None or w3 is None or w2 is None:
            raise ConfigError("a layer has all matrices of a shared expert or none")
        gate, up = self.product(self._x, w1), self.product(self._x, w3)
        inner = swiglu(gate, up, layer.plan.shared_swiglu_limit, backend="reference")
        return self.product(inner, w2)

    # ---- helpers ----

    def _floats(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._setting.device)

    def _products(self, x: Tensor, products: Products) -> Tensor:
        made = self._floats(x.shape[0], products.width)
        at = 0
        for matrix in products.matrices:
            self._multiply(made[:, at : at + matrix.rows], x, matrix, 1)
            at += matrix.rows
        return made

    def _multiply(self, y: Tensor, x: Tensor, matrix: DeviceMatrix, groups: int) -> None:
        precise = self._setting.is_precise
        wide = not precise and matrix.type in _FLOAT_TYPES
        options: dict[str, Any] = {"groups": groups, "precise": precise, "wide": wide}
        needed = matmul_scratch_bytes(x.shape[0], matrix, self._setting.device, **options)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(0, dtype=torch.uint8, device=self._setting.device)
            self._scratch = torch.empty(needed, dtype=torch.uint8, device=self._setting.device)
        matmul(y, x, matrix, scratch=self._scratch, **options)

    def _table(self, plan: LayerPlan, ratio: int) -> tuple[Tensor, Tensor]:
        """Rotations of the tokens, or (ratio > 0) of the windows that may end in the chunk."""
        key = (plan.rope, ratio)
        if key not in self._tables:
            device = self._setting.device
            stop = self.start + self.count
            if ratio:
                last = max(stop // ratio, self.start // ratio + 1)
                positions = torch.arange(self.start // ratio, last, device=device) * ratio
            else:
                positions = torch.arange(self.start, stop, device=device)
            rope = plan.rope
            frequencies = rope_frequencies(self._setting.config.rope_dim, rope.theta, rope.scaling)
            table = rope_table(positions, frequencies.to(device), torch.float32)
            self._tables[key] = (table.cos, table.sin)
        return self._tables[key]

    def _wait_for_device(self, waiting: deque[Any]) -> None:
        """Let the device come within a few layers."""
        if self._setting.device.type != "cuda" or self._hooks.should_stop is None:
            return
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        waiting.append(event)
        if len(waiting) > _LAYERS_AHEAD:
            waiting.popleft().synchronize()


def _input_products(layer: DeviceLayer, made: Tensor) -> InputProducts:
    """The products of the input as `prepare` takes them."""
    columns = layer.entrance.columns

    def pair(first: str, second: str) -> tuple[Tensor, Tensor]:
        return made[:, columns[first]], made[:, columns[second]]

    return InputProducts(
        qr=made[:, columns["qr"]],
        kv=made[:, columns["kv"]],
        compressor=pair("values", "gates") if layer.compressor is not None else None,
        indexer=pair("index_values", "index_gates") if layer.indexer is not None else None,
    )
