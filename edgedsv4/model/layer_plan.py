"""One record per layer: everything in which layers differ, decided once from the configuration.

The forward asks the plan, never the model's version. A layer's compressed rows and its selection
may belong to another layer (`kv_source`, `index_source`); in DeepSeek-V4 both are the layer itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig, RopeScaling

OVERLAP_RATIO = 4
"""The ratio whose windows overlap (two series) and whose rows are selected by the indexer."""


@dataclass(frozen=True, slots=True)
class RopePlan:
    """Base and scaling of one layer's rotary embedding; equal plans share a table."""

    theta: float
    scaling: RopeScaling | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """What one layer does."""

    layer: int
    """0-based index; the draft block comes after the last layer."""
    ratio: int
    """Tokens per compressed row; 0 means window only."""
    kv_source: int | None
    """Layer whose compressed rows this one attends to."""
    index_source: int | None
    """Layer whose selection this one uses; None attends to all visible rows."""
    has_overlap: bool
    """Compression windows overlap by one window."""
    is_hash_routed: bool
    """Experts follow from the token id."""
    rope: RopePlan
    """Rotation of queries, keys, compressed rows and outputs alike."""
    swiglu_limit: float
    """Clamp of the routed experts."""
    shared_swiglu_limit: float
    """Clamp of the shared expert."""

    def visible_rows(self, length: int) -> int:
        """Compressed rows that the last of `length` tokens sees; a row completed by it included."""
        return length // self.ratio if self.ratio else 0

    def first_raw_position(self, position: int) -> int:
        """First position whose raw projections a compressor needs when `position` comes next."""
        if not self.ratio:
            return position
        window = position // self.ratio - (1 if self.has_overlap else 0)
        return max(0, window * self.ratio)


def layer_plans(config: ModelConfig) -> tuple[LayerPlan, ...]:
    """The plan of every layer of the main model."""
    return tuple(
        _plan(config, layer, config.compress_ratios[layer], is_hash=layer < config.num_hash_layers)
        for layer in range(config.num_layers)
    )


def draft_plan(config: ModelConfig) -> LayerPlan:
    """The plan of the MTP block: window only, plain RoPE, routed by score."""
    return _plan(config, config.num_layers, 0, is_hash=False)


def _plan(config: ModelConfig, layer: int, ratio: int, *, is_hash: bool) -> LayerPlan:
    if ratio:
        rope = RopePlan(config.compress_rope_theta, config.rope_scaling)
    else:
        rope = RopePlan(config.rope_theta, None)
    limits = min(layer, config.num_layers - 1)
    return LayerPlan(
        layer=layer,
        ratio=ratio,
        kv_source=layer if ratio else None,
        index_source=layer if ratio == OVERLAP_RATIO else None,
        has_overlap=ratio == OVERLAP_RATIO,
        is_hash_routed=is_hash,
        rope=rope,
        swiglu_limit=config.swiglu_limits[limits],
        shared_swiglu_limit=config.shared_swiglu_limits[limits],
    )
