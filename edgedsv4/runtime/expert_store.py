"""Routed experts that are used where they lie: in the mapped file, cached by the operating system.

`MappedExperts` is the simplest `ExpertSource`: nothing is copied or placed, a fetch hands out views
whose pages are read when a product touches them. What can go wrong is said with layer and expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgedsv4.errors import ExpertReadError
from edgedsv4.runtime.device import place_weights

if TYPE_CHECKING:
    import torch

    from edgedsv4.model.weights import ExpertWeights, RoutedExperts


class MappedExperts:
    """Hands out the experts of an opened model as views of its file.

    Args:
        experts: of the opened model.
        device: where they are needed; another one than the CPU gets a copy with every fetch.
    """

    def __init__(self, experts: RoutedExperts, device: torch.device) -> None:
        self._experts = experts
        self._device = device

    @property
    def is_resident(self) -> bool:
        """Views of the file stay where they are; copies on another device do not."""
        return self._device.type == "cpu"

    def check_unchanged(self) -> None:
        """Look at every file that holds experts.

        Raises:
            FormatError: a file changed since it was opened.
            ExpertReadError: a file cannot be read any more.
        """
        try:
            self._experts.check_unchanged()
        except OSError as error:
            raise ExpertReadError(f"the routed experts cannot be read: {error}") from error

    def fetch(self, layer: int, expert_ids: Sequence[int]) -> list[ExpertWeights]:
        """Weights of `expert_ids` of one layer, in that order; the file is checked first.

        Raises:
            FormatError: the file changed since it was opened.
            ExpertReadError: the file cannot be read any more, or there is no such expert.
        """
        return [self._expert(layer, expert_id) for expert_id in expert_ids]

    def _expert(self, layer: int, expert_id: int) -> ExpertWeights:
        try:
            return place_weights(self._experts.expert(layer, expert_id), self._device)
        except (OSError, IndexError) as error:
            raise ExpertReadError(
                f"expert {expert_id} of layer {layer} cannot be read: {error}"
            ) from error
