"""Which expert has to go when another needs its slot."""

from __future__ import annotations

from collections.abc import Callable, Collection


class LeastRecentlyUsed:
    """The expert whose last selection is longest ago goes."""

    def __init__(self) -> None:
        self._order: dict[int, None] = {}  # oldest use first

    def used(self, keys: Collection[int], weight: float) -> None:  # noqa: ARG002  # of the protocol
        """Make experts of the cache the newest."""
        order = self._order
        for key in keys:
            if key in order:
                del order[key]
                order[key] = None

    def inserted(self, key: int) -> None:
        """A new expert is the newest."""
        self._order[key] = None

    def removed(self, key: int) -> None:
        """Forget an expert."""
        del self._order[key]

    def make_room(
        self,
        newcomer: int,  # noqa: ARG002  # of the protocol
        is_protected: Callable[[int], bool],
        *,
        may_refuse: bool,  # noqa: ARG002
    ) -> int | None:
        """The oldest expert that is not protected."""
        for key in self._order:
            if not is_protected(key):
                del self._order[key]
                return key
        return None

    def end_step(self, tokens: int) -> None:
        """Age is an order here, not a time."""
