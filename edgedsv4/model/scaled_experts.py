"""Routed experts of a chunk by block-scaled products, as long as those are right.

The products are chosen by the family of the card, and a compiler may still get them wrong there. So
the first one of a model is made in the other way too, and a wrong one ends their use.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.kernels.gpu.expert_matmul import expert_ffn_chunk
from edgedsv4.kernels.gpu.expert_scaled import expert_ffn_scaled

if TYPE_CHECKING:
    from edgedsv4.kernels.gpu.expert_matmul import ExpertScratch
    from edgedsv4.kernels.gpu.planes import DeviceMatrix

logger = logging.getLogger(__name__)

LIMIT = 0.2
"""Error of a result, of its size, beyond which it is taken for wrong; 8-bit floats cost less."""


class ScaledExperts:
    """Makes the products of one model; see the module."""

    def __init__(self) -> None:
        self._is_right: bool | None = None
        """None until the first product."""

    def run(
        self,
        out: Tensor,
        chosen: tuple[Tensor, Tensor, Tensor],
        banks: tuple[DeviceMatrix, DeviceMatrix, DeviceMatrix],
        limit: float,
        scratch: ExpertScratch,
    ) -> None:
        """As `expert_ffn_scaled`; `chosen` are x, ids and weights."""
        if self._is_right is None:
            expected = torch.empty_like(out)
            expert_ffn_chunk(expected, *chosen, banks, limit, scratch=scratch)
            expert_ffn_scaled(out, *chosen, banks, limit, scratch=scratch)
            self._is_right = self._judged(out, expected)
            if not self._is_right:
                out.copy_(expected)
        elif self._is_right:
            expert_ffn_scaled(out, *chosen, banks, limit, scratch=scratch)
        else:
            expert_ffn_chunk(out, *chosen, banks, limit, scratch=scratch)

    def _judged(self, found: Tensor, expected: Tensor) -> bool:
        difference, size = float((found - expected).norm()), float(expected.norm())
        is_right = difference <= LIMIT * size
        if not is_right:
            logger.warning(
                "block-scaled products of experts are off by %.2g of %.2g on this card; going on"
                " without them",
                difference,
                size,
            )
        return is_right
