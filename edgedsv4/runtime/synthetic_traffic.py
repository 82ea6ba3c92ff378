"""What a forward on a GPU has to move, kernel by kernel: weights, cached rows, activations.

Counted from the shapes of the network's tensors, so that one on the device `meta` will do. Every
byte counts once for each launch that needs it: what several programs of a launch read again comes
from caches, and partial sums between the launches of one operation are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from edgedsv4.kernels.gpu.hyper import FEW_TOKENS
from edgedsv4.kernels.gpu.matmul import FUSED_TOKENS
from edgedsv4.kernels.gpu.planes import DeviceMatrix, matrix_bytes
from edgedsv4.runtime.memory_plan import StateLayout

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from edgedsv4.model.gpu_network import DeviceHyper, DeviceLayer, DeviceNetwork

_FLOAT = 4
_FLOAT_TYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that launches move."""

    weights: int = 0
    """Parameters read."""
    rows: int = 0
    """Rows of the KV cache read."""
    activations: int = 0
    """Everything else that goes in or out, rows that are written among it."""

    def __add__(self, other: Traffic) -> Traffic:
        """Both together."""
        return Traffic(
            self.weights + other.weights,
            self.rows + other.rows,
            self.activations + other.activations,
        )

    @property
    def from_memory(self) -> int:
        """What no cache can hold from one token to the next: weights and rows."""
        return self.weights + self.rows

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.rows + self.activations


class _Counter:
    """Adds up traffic by the name of the kernel."""

    def __init__(self) -> None:
        self.found: dict[str, Traffic] = {}

    def add(self, kernel: str, *, weights: int = 0, rows: int = 0, floats: int = 0) -> None:
        """Count a launch; `floats` are activations of four bytes."""
        before = self.found.get(kernel, Traffic())
        self.found[kernel] = before + Traffic(weights, rows, floats * _FLOAT)


def stored_bytes(matrix: DeviceMatrix) -> int:
    """Bytes of a matrix without its look-up table."""
    options = {"scale_cols": matrix.scale_cols} if matrix.scale_cols else {}
    return matrix_bytes(matrix.type, matrix.rows, matrix.cols, **options)


def network_bytes(part: object) -> int:
    """Bytes of all matrices and vectors of a network, or of a part of it."""
    return sum(_sizes(part))


def _sizes(part: object) -> Iterator[int]:
    if isinstance(part, DeviceMatrix):
        yield stored_bytes(part)
    elif isinstance(part, Tensor):
        yield part.nbytes
    elif isinstance(part, tuple):
        for item in part:
            yield from _sizes(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _sizes(getattr(part, field.name))


def decode_traffic(config: ModelConfig, network: DeviceNetwork, depth: int) -> dict[str, Traffic]:
    """What decoding the token after `depth` others moves, by kernel.

    Args:
        config: shape of the model.
        network: its weights, on any device.
        depth: tokens in the timeline.
    """
    counter = _Counter()
    hidden = config.hidden_size
    streams = config.hc_streams * hidden
    counter.add("_embed_kernel", weights=network.embed.bytes // network.embed.rows, floats=streams)
    for index, layer in enumerate(network.layers):
        _add_hyper(counter, layer.hc_attn, layer.attn_norm, streams, is_first=index == 0)
        _add_attention(counter, config, layer, depth)
        _add_hyper(counter, layer.hc_ffn, layer.ffn_norm, streams)
        _add_experts(counter, config, layer)
    _add_hyper(counter, network.hc_head, network.norm, streams)
    _add_product(counter, network.head)
    counter.add("argmax_kernel", floats=config.vocab_size)
    return counter.found


def _add_hyper(
    counter: _Counter, hyper: DeviceHyper, norm: Tensor, streams: int, *, is_first: bool = False
) -> None:
    """Write the last output to the streams, mix and read; the first one has nothing to write."""
    hidden = norm.numel()
    moved = streams if is_first else 2 * streams + hidden
    counter.add("write_kernel", weights=hyper.fn.nbytes, floats=moved)
    small = hyper.base.nbytes + hyper.scale.nbytes + norm.nbytes
    counter.add("read_kernel", weights=small, floats=streams + hidden)


def _add_product(counter: _Counter, matrix: DeviceMatrix, groups: int = 1) -> None:
    floats = groups * matrix.cols + matrix.rows
    counter.add("_matvec_kernel", weights=stored_bytes(matrix), floats=floats)


def _add_attention(counter: _Counter, config: ModelConfig, layer: DeviceLayer, depth: int) -> None:
    layout, plan = StateLayout(config), layer.plan
    heads = config.num_heads * config.head_dim
    for matrix in (*layer.entrance.matrices, *layer.queries.matrices, layer.wo_b):
        _add_product(counter, matrix)
    _add_product(counter, layer.wo_a, config.output_groups)
    parts = (layer.q_norm, layer.kv_norm, layer.compressor, layer.indexer)
    # The token's raw rows are kept, and on average as many per series are pooled.
    series = 2 if plan.has_overlap else 1
    compressors = [part for part in (layer.compressor, layer.indexer) if part is not None]
    raw = sum((1 + series) * 2 * series * part.norm.numel() for part in compressors)
    counter.add(
        "_prepare_kernel",
        weights=network_bytes(parts),
        floats=layer.entrance.width + config.q_lora_rank + raw + layout.row_bytes // _FLOAT,
    )
    counter.add("_finish_queries_kernel", floats=2 * layer.queries.width)
    seen = taken = plan.visible_rows(depth + 1)
    if layer.indexer is not None:
        taken = min(seen, config.index_topk)
        scored = seen if seen > config.index_topk else 0
        queries = config.index_heads * (config.index_dim + 1)
        counter.add(
            "_score_fp4_kernel",
            rows=scored * layout.index_key_bytes,
            floats=scored + (queries if scored else 0),
        )
        counter.add("_select_kernel", floats=scored + config.index_topk)
    attended = min(config.window, depth + 1) + taken
    counter.add("_decode_kernel", rows=attended * layout.row_bytes, floats=heads)
    counter.add("_combine_kernel", weights=layer.sink.nbytes, floats=heads)


def _add_experts(counter: _Counter, config: ModelConfig, layer: DeviceLayer) -> None:
    _add_product(counter, layer.router)
    chosen, bank = config.experts_per_token, layer.experts
    by_token = 0 if layer.expert_table is None else layer.expert_table[0].nbytes
    counter.add(
        "_route_kernel",
        weights=by_token + (0 if layer.bias is None else layer.bias.nbytes),
        floats=config.num_experts + 2 * chosen,
    )
    routed = [stored_bytes(m) * chosen // config.num_experts for m in (bank.w1, bank.w3, bank.w2)]
    gate_up = sum(stored_bytes(m) for m in (layer.shared_w1, layer.shared_w3) if m is not None)
    down = 0 if layer.shared_w2 is None else stored_bytes(layer.shared_w2)
    inner = (chosen + config.num_shared_experts) * config.expert_width
    floats = config.hidden_size + inner
    counter.add("_gate_up_kernel", weights=gate_up + routed[0] + routed[1], floats=floats)
    counter.add("_down_kernel", weights=down + routed[2], floats=floats)


def prefill_traffic(config: ModelConfig, network: DeviceNetwork, tokens: int) -> dict[str, Traffic]:
    """What a prefill of an empty timeline in one chunk moves at least, by its larger kernels.

    Args:
        config: shape of the model.
        network: its weights, on any device.
        tokens: of the chunk.
    """
    counter = _Counter()
    streams = config.hc_streams * config.hidden_size
    counter.add(
        "_embed_kernel",
        weights=tokens * (network.embed.bytes // network.embed.rows),
        floats=tokens * streams,
    )
    hit = 1 - (1 - config.experts_per_token / config.num_experts) ** tokens
    pairs = tokens * config.experts_per_token
    for layer in network.layers:
        dense = (*layer.entrance.matrices, *layer.queries.matrices, layer.wo_a, layer.wo_b)
        shared = (layer.shared_w1, layer.shared_w3, layer.shared_w2)
        for matrix in (*dense, layer.router, *(m for m in shared if m is not None)):
            _add_chunk_product(counter, matrix, tokens)
        bank = layer.experts
        gate_up, down = stored_bytes(bank.w1) + stored_bytes(bank.w3), stored_bytes(bank.w2)
        # Their operands have two bytes.
        floats = pairs * (config.hidden_size + config.expert_width) // 2
        counter.add("_gate_up_kernel", weights=int(hit * gate_up), floats=floats)
        counter.add("_down_kernel", weights=int(hit * down), floats=floats)
        for hyper in (layer.hc_attn, layer.hc_ffn):
            if tokens > FEW_TOKENS:
                moved = tokens * (2 * streams + config.hidden_size)
                counter.add("_product_kernel", weights=hyper.fn.nbytes, floats=moved)
                counter.add("read_kernel", floats=tokens * (streams + config.hidden_size))
        _add_chunk_attention(counter, config, layer, tokens)
    _add_product(counter, network.head)
    return counter.found


def _add_chunk_attention(
    counter: _Counter, config: ModelConfig, layer: DeviceLayer, tokens: int
) -> None:
    """Queries, of four bytes before they are finished and of two behind, and every row once."""
    heads = config.num_heads * config.head_dim
    seen = layer.plan.visible_rows(tokens)
    has_scores = layer.indexer is not None and seen > config.index_topk
    index = 2 * config.index_heads * config.index_dim if has_scores else 0
    counter.add("_finish_queries_kernel", floats=tokens * (heads + heads // 2 + index))
    rows = (tokens + seen) * StateLayout(config).row_bytes
    counter.add("_chunk_kernel", rows=rows, floats=tokens * heads)


def _add_chunk_product(counter: _Counter, matrix: DeviceMatrix, tokens: int) -> None:
    if tokens <= FUSED_TOKENS:
        floats = tokens * (matrix.cols + matrix.rows)
        counter.add("_fused_kernel", weights=stored_bytes(matrix), floats=floats)
        return
    # Decoded to one bf16 number per element, to two where the products are wide.
    halves = matrix.rows * matrix.cols * (2 if matrix.type in _FLOAT_TYPES else 1)
    counter.add("_decode_kernel", weights=stored_bytes(matrix), floats=halves // 2)


def operations_per_token(config: ModelConfig, network: DeviceNetwork) -> int:
    """Multiplications and additions of a prefilled token with its weights; attention comes on top.

    Args:
        config: shape of the model.
        network: its weights, on any device.
    """
    count = 0
    for layer in network.layers:
        dense = (*layer.entrance.matrices, *layer.queries.matrices, layer.wo_a, layer.wo_b)
        shared = (layer.shared_w1, layer.shared_w3, layer.shared_w2)
        matrices = (*dense, layer.router, *(m for m in shared if m is not None))
        count += sum(matrix.rows * matrix.cols for matrix in matrices)
        bank = layer.experts
        routed = sum(matrix.rows * matrix.cols for matrix in (bank.w1, bank.w3, bank.w2))
        count += routed * config.experts_per_token // config.num_experts
        count += layer.hc_attn.fn.numel() + layer.hc_ffn.fn.numel()
    return 2 * count
