"""Logits that stay on a GPU: tokens are drawn there, and copies are made when someone looks.

The vocabulary's logits are half a megabyte; copying them for every token would cost more than
drawing from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgedsv4.kernels.gpu.sample import UNDECIDED, SamplingWork, TokenCounts, options_of, sample

if TYPE_CHECKING:
    from edgedsv4.kernels.sample import SamplingRules

_NO_COUNTS = TokenCounts(flags=None, generated=None, bias=None)


class DeviceSampler:
    """Draws from logits where they are; one per timeline.

    Args:
        vocab_size: V.
        device: of the logits.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._work = SamplingWork.allocate(vocab_size, device)
        self._token = torch.empty(1, dtype=torch.int32, device=device)

    def draw(self, row: Tensor, rules: SamplingRules, u: float) -> int | None:
        """The token that `kernels.sample` would draw from [V] logits; None if that has to do it."""
        options = torch.tensor(options_of(rules, u), dtype=torch.float64)
        self._work.options[: len(options)].copy_(options)
        sample(self._token, row, self._work, _NO_COUNTS, rules)
        token_id = int(self._token)
        return None if token_id == UNDECIDED else token_id


class DeviceLogits:
    """Logits [V] float32 of one position, finite.

    Args:
        row: on the device; nobody else writes to it.
        best: the largest one's token, of equal ones the first.
        sampler: draws from it.
    """

    def __init__(self, row: Tensor, best: int, sampler: DeviceSampler) -> None:
        self._row = row
        self._best = best
        self._sampler = sampler
        self._copy: npt.NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        """Memory on the device."""
        return self._row.nbytes

    def numpy(self) -> npt.NDArray[np.float32]:
        """A copy on the host, the same one every time."""
        if self._copy is None:
            self._copy = self._row.cpu().numpy()
        return self._copy

    def draw(self, rules: SamplingRules, u: float) -> int | None:
        """The token that `kernels.sample` would draw; None if it needs the host for that."""
        if rules.has_changes:
            return None
        if not rules.scale:
            return self._best
        return self._sampler.draw(self._row, rules, u)
