"""Points at which a caller can watch, steer or stop a forward.

Selections are watched and forced by parity tests and traces; stopping is how a reply is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from edgedsv4.errors import CancelledError

SelectionHook = Callable[[int, Tensor, Tensor], Tensor]
GuessHook = Callable[[int, Tensor], None]
MOST_GUESSES = 64
"""Experts per token that can be guessed for a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardHooks:
    """All optional; a hook that is None costs nothing."""

    on_topk: SelectionHook | None = None
    """(layer, scores [T, n] with -inf where invisible, ids [T, k] with -1 where none) -> the ids to
    use. Called on layers with an indexer once some query sees more rows than it may select; n
    covers all rows of the layer."""
    on_experts: SelectionHook | None = None
    """(layer, selection scores [T, E], ids [T, k]) -> the ids to use. Also called on hash-routed
    layers."""
    on_guesses: GuessHook | None = None
    """(layer, ids [T, n] as `guess_experts` guesses them, the likeliest first). Called on layers
    that route by score, but for the first one, before their own routing; on the CPU alone."""
    guesses: int = 8
    """n of `on_guesses`, 1..64; less where there are fewer experts."""
    should_stop: Callable[[], bool] | None = None
    """Asked between layers, experts and attention tiles; True ends the forward with
    `CancelledError`."""

    def check_stop(self) -> None:
        """Raise `CancelledError` if the caller wants to stop."""
        if self.should_stop is not None and self.should_stop():
            raise CancelledError("cancelled; the session stands at its last complete token")
