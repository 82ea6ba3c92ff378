"""One caller at a time, who is told so instead of waiting, whatever moment an interrupt comes at.

A lock that is acquired before `try` and released in `finally` stays locked for good when Ctrl+C
comes between two statements there. Here the use is an object: whoever drops it, by whatever error,
has given it back. Uses form a chain; the next one is appended by `dict.setdefault`, which only one
of several threads wins.
"""

from __future__ import annotations

import weakref


class Use:
    """The right to be the one user; it ends when given back or when nothing refers to it."""

    __slots__ = ("__weakref__", "is_over")

    def __init__(self) -> None:
        self.is_over = False


class _Link:
    """A use in the chain, which does not keep it alive."""

    __slots__ = ("_use", "next")

    def __init__(self, use: Use | None) -> None:
        self._use = None if use is None else weakref.ref(use)
        self.next: dict[int, _Link] = {}

    @property
    def is_over(self) -> bool:
        use = None if self._use is None else self._use()
        return use is None or use.is_over


class SingleUser:
    """Lets one `Use` in at a time."""

    def __init__(self) -> None:
        self._last = _Link(None)

    def take(self, use: Use) -> bool:
        """Whether `use`, a new one, is now the one; never waits for the other to end."""
        link = _Link(use)
        while (last := self._last).is_over:
            # A slower thread may set an older link here; the walk then starts further back.
            self._last = following = last.next.setdefault(0, link)
            if following is link:
                return True
        return False

    def give_back(self, use: Use) -> None:
        """Let the next one in; nothing happens for a use that was never let in."""
        use.is_over = True
