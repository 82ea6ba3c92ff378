"""What one forward is about: its tokens, their positions, and the tables all layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.kernels.mhc import HyperConstants
from edgedsv4.kernels.rope import RopeTable, rope_frequencies, rope_table

if TYPE_CHECKING:
    from edgedsv4.config import Backend, ModelConfig
    from edgedsv4.model.hooks import ForwardHooks
    from edgedsv4.model.layer_plan import RopePlan
    from edgedsv4.model.weights import MoeWeights


@dataclass(slots=True, kw_only=True)
class Step:
    """One chunk of T tokens on its way through the layers."""

    config: ModelConfig
    start: int
    """Position of the first token."""
    token_ids: Tensor
    """[T] int64."""
    dtype: torch.dtype
    """Compute dtype."""
    is_quantized: bool
    """Index queries are rounded like the index keys (profile `default`)."""
    backend: Backend
    hooks: ForwardHooks
    frequencies: dict[RopePlan, Tensor]
    """Filled on first use; belongs to the model."""
    routers: Sequence[MoeWeights] = ()
    """Of all layers, in a forward of the main model."""
    positions: Tensor = field(init=False)
    """[T] int64, absolute."""
    _tables: dict[RopePlan, RopeTable] = field(init=False, default_factory=dict)
    _is_finite: list[Tensor] = field(init=False, default_factory=list)
    """[] bool each."""

    def __post_init__(self) -> None:
        device = self.token_ids.device
        self.positions = torch.arange(self.start, self.stop, device=device)

    @property
    def count(self) -> int:
        """T."""
        return int(self.token_ids.shape[0])

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + self.count

    def router_after(self, layer: int) -> MoeWeights | None:
        """The router of the next layer, if there is one and it routes by score."""
        following = self.routers[layer + 1 : layer + 2]
        return following[0] if following and following[0].expert_table is None else None

    def watch(self, values: Tensor) -> None:
        """Remember whether values are finite that a selection or a rounding could hide."""
        self._is_finite.append(torch.isfinite(values).all())

    def watched_are_finite(self) -> bool:
        """Whether everything watched was finite; waits for the device once."""
        return not self._is_finite or bool(torch.stack(self._is_finite).all())

    @property
    def hyper_constants(self) -> HyperConstants:
        """Scalars of the hyper-connections."""
        config = self.config
        return HyperConstants(config.hc_sinkhorn_iterations, config.hc_eps, config.rms_norm_eps)

    def query_table(self, rope: RopePlan) -> RopeTable:
        """Rotation of the chunk's own positions, [T, r / 2]."""
        if rope not in self._tables:
            self._tables[rope] = self.table(rope, self.positions)
        return self._tables[rope]

    def table(self, rope: RopePlan, positions: Tensor) -> RopeTable:
        """Rotation of any positions, [N, r / 2]."""
        if rope not in self.frequencies:
            frequencies = rope_frequencies(self.config.rope_dim, rope.theta, rope.scaling)
            self.frequencies[rope] = frequencies.to(positions.device)
        return rope_table(positions, self.frequencies[rope], self.dtype)
