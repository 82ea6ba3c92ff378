"""A store whose experts in memory are used without asking it: beside a GPU, by C in mid-step.

A table is kept up to date with what the cache holds; what only passes through staging slots is not
in it. One forward at a time uses the table: experts leave the cache only while that forward asks
for others, or between forwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from edgedsv4.runtime.ram_store import ExpertStore
from edgedsv4.runtime.slot_books import Key, SlotBooks

if TYPE_CHECKING:
    from edgedsv4.model.moe import ExpertTable


class WatchedStore(ExpertStore):
    """An `ExpertStore` that is a `WatchedStream`; see both."""

    _table: ExpertTable | None = None

    def watch(self, table: ExpertTable) -> None:
        """Keep a table up to date from now on, with what is in memory already."""
        with self._lock:
            self._table = table
            table.clear()
            if not self._is_dirty:
                for key, slot in self._books.cached():
                    self.came(key, slot)

    def begin_forward(self, token_ids: Sequence[int] | None) -> None:
        """See `ExpertStore`; first, what an interrupt left half done is repaired."""
        with self._lock:
            if self._is_dirty and self._begin_change():
                self._is_dirty = False
        super().begin_forward(token_ids)

    def note_used(self, uses: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Count experts (layer, ids) that were found in the table."""
        with self._lock:
            if not self._begin_change():
                return
            books = self._books
            for layer, experts in uses:
                books.cache.use(layer, experts, 1.0)
                for expert in experts:
                    is_ahead = (layer, expert) in books.unused_prefetch
                    books.unused_prefetch.discard((layer, expert))
                    self._counts["prefetch_hits" if is_ahead else "ram_hits"] += 1
            self._is_dirty = False

    def let_go(self) -> None:
        """Nothing that was handed to this thread is used any more; its forward may go on."""
        ask = getattr(self._local, "ask", None)
        if ask is None:
            return
        with self._lock:
            if self._is_dirty:
                # Its claims are of books that will be made anew without it.
                self._local.ask = None
            else:
                self._is_dirty = True
                self._let_go(ask, is_over=True)
                self._is_dirty = False
            self._asks.discard(ask)

    def close(self) -> None:
        """See `ExpertStore.close`; nobody watches any more, so that memory is free at once."""
        super().close()
        with self._lock:
            self._table = None
            self._books.unwatch()

    def _new_books(self, slots: Iterable[int], cached: int) -> SlotBooks:
        return SlotBooks(slots, cached, self.options.policy(), self)

    def came(self, key: Key, slot: int) -> None:
        """See `SlotWatcher`."""
        if self._table is not None:
            self._table.put(*key, self._filler.record(slot))

    def gone(self, key: Key) -> None:
        """See `SlotWatcher`."""
        if self._table is not None:
            self._table.drop(*key)

    def _all_gone(self) -> None:
        if self._table is not None:
            self._table.clear()
