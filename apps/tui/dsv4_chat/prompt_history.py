"""Earlier prompts, gone through with Up and Down.

The idea: the line being typed is the newest entry; it comes back when one goes down again.
"""

from __future__ import annotations

from collections.abc import Iterable


class PromptHistory:
    """What was sent before, oldest first.

    Args:
        limit: entries that are kept.
        earlier: from other runs, oldest first.
    """

    def __init__(self, limit: int, earlier: Iterable[str] = ()) -> None:
        self._limit = limit
        self._entries: list[str] = []
        self._place: int | None = None
        self._draft = ""
        self.extend(earlier)

    def extend(self, earlier: Iterable[str]) -> None:
        """Put prompts of other runs before those of this one."""
        known = set(self._entries)
        older = [text for text in earlier if text.strip() and text not in known]
        self._entries = ([*older, *self._entries])[-self._limit :] if self._limit else []
        self._place = None

    def add(self, text: str) -> None:
        """Note a prompt that was sent; the same one twice in a row counts once."""
        self._place = None
        if text.strip() and self._entries[-1:] != [text]:
            self._entries = [*self._entries, text][-self._limit :] if self._limit else []

    def older(self, current: str) -> str | None:
        """The prompt before; None at the oldest. `current` is what stands in the prompt."""
        if self._place is None:
            self._draft = current
            self._place = len(self._entries)
        if self._place == 0:
            return None
        self._place -= 1
        return self._entries[self._place]

    def newer(self) -> str | None:
        """The prompt behind, at last the draft; None when no earlier one is shown."""
        if self._place is None:
            return None
        self._place += 1
        if self._place < len(self._entries):
            return self._entries[self._place]
        self._place = None
        return self._draft

    def leave(self) -> None:
        """The text was changed: it is a draft of its own now."""
        self._place = None
