"""A timeline's state on a GPU: the tensors of `KvCache`, filled by kernels.

A decode step writes its rows straight into the rings, at slots of positions that no later step
reads; if it fails, only the oldest position is lost. A chunk stages the last rows of every ring
and lets them in at the end, like the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgedsv4.model.kv_cache import KvCache

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from edgedsv4.model.gpu_decode import DecodeStep
    from edgedsv4.model.kv_cache import Numerics
    from edgedsv4.model.layer_plan import LayerPlan


class GpuKvCache(KvCache):
    """State of one timeline through all layers of a model, or of its draft block."""

    def __init__(
        self,
        config: ModelConfig,
        plans: Sequence[LayerPlan],
        *,
        capacity: int,
        numerics: Numerics,
    ) -> None:
        super().__init__(config, plans, capacity=capacity, numerics=numerics)
        self.step: DecodeStep | None = None
        """Evaluates one token; made, and captured, by the first one."""
        self.ring_slots = [(ring, ring.slots) for _, ring in self._rings()]

    def forget_overwritten(self) -> None:
        """A step is about to write the next position's rows into the rings."""
        end = self.length + 1
        for ring, slots in self.ring_slots:
            ring.oldest = max(ring.oldest, end - slots)

    def commit_step(self) -> None:
        """Make the token whose rows a step wrote part of the timeline."""
        self.length += 1
