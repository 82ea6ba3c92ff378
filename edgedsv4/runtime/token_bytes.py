"""Bytes that one decode step has to read, which bound its speed: weights, and KV cache by depth.

Counted from the header, not measured: every dense matrix and parameter once, the chosen experts,
one row of the embedding and of the tables by token id; of the cache what attention and the indexer
look at. Rows that are written, scratch and whatever a kernel reads twice are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgedsv4.model.bound_weights import BoundWeights
    from edgedsv4.runtime.memory_plan import StateLayout

_BY_TOKEN = ("embed", ".tid2eid")
_DRAFT = "draft."


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """What one token reads of the weights."""

    dense_weights: int
    """Everything but routed experts and the MTP block, the head included."""
    expert_weights: int
    """The routed experts that one token uses, of all layers."""

    @classmethod
    def of(cls, bound: BoundWeights) -> TokenBytes:
        """Count the weights of an opened model."""
        config = bound.config
        dense = sum(
            tensor.nbytes // (config.vocab_size if role.endswith(_BY_TOKEN) else 1)
            for role, tensor in bound.tensors.items()
            if not role.startswith(_DRAFT)
        )
        layers = bound.experts[: config.num_layers]
        matrices = (m for experts in layers for m in (*experts.w1, *experts.w3, *experts.w2))
        experts = sum(matrix.nbytes for matrix in matrices)
        return cls(dense, experts * config.experts_per_token // config.num_experts)


def cache_read_bytes(layout: StateLayout, depth: int) -> int:
    """Bytes of the KV cache that the token after `depth` others looks at, all layers."""
    config = layout.config
    window_rows = min(config.window, depth + 1)
    total = config.num_layers * window_rows * layout.row_bytes
    for ratio in config.compress_ratios:
        if ratio:
            rows = (depth + 1) // ratio
            if ratio == 4:
                total += rows * layout.index_key_bytes
                rows = min(rows, config.index_topk)
            total += rows * layout.row_bytes
    return total
