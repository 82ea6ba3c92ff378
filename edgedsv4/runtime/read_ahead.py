"""Which experts are read before they are asked for, and when.

Three kinds: what tokens are sure to need (layers that route by a table), the next layer of a chunk
that uses most experts, and guesses at the next layer of a chunk of few tokens: its own router on
what the layer before it saw, or what a frequency file says of the experts of the layer before it.

Guesses are often wrong. They are read only while nothing that was asked for is being read or waits,
into a place that the policy gives up for them or one of half the staging slots, and dropped when
the layer asks for others. Callers hold the lock of the books.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from edgedsv4.runtime.store_ask import SMALL_TOKENS, Guess

if TYPE_CHECKING:
    from edgedsv4.runtime.ram_store import StoreOptions
    from edgedsv4.runtime.slot_books import Key, SlotBooks
    from edgedsv4.runtime.slot_filler import SlotFiller
    from edgedsv4.runtime.store_ask import Ask

LIKELY = 0.9
"""Share of a layer's experts that an evaluation uses from which the next layer is read ahead."""


class ReadAhead:
    """Begins reads that nobody waits for.

    Args:
        options: of the store.
        filler: that reads.
        experts_of: experts of a layer.
    """

    def __init__(
        self, options: StoreOptions, filler: SlotFiller, experts_of: Callable[[int], int]
    ) -> None:
        self.begun = 0
        """Reads so far."""
        self.guess_misses = 0
        """Absent experts that were asked for at layers with a guess."""
        self.guess_hits = 0
        """Those of them that the guess named."""
        self._options = options
        self._filler = filler
        self._experts_of = experts_of
        self._tables = {layer: table.numpy() for layer, table in options.tables.items()}
        self._spare = options.staging // 2

    # ---- sure ----

    def sure(self, token_ids: Sequence[int]) -> set[Key]:
        """Experts that a forward of these tokens is sure to need."""
        if self._options.prefetch == "off":
            return set()
        rows = list(token_ids)
        return {
            (layer, expert)
            for layer, table in self._tables.items()
            for expert in table[rows].ravel().tolist()
            if not self._options.is_elsewhere(layer, expert)
        }

    def read_sure(self, books: SlotBooks, sure: set[Key]) -> None:
        """Begin to read what is sure to be needed."""
        # Half the slots at most, so that what is read ahead cannot push itself out.
        most = (self._options.slots + self._options.staging - 1) // 2
        self._read(books, sorted(sure), most, lambda layer, expert: (layer, expert) in sure)

    # ---- whole layers ----

    def read_layer(self, books: SlotBooks, ask: Ask) -> None:
        """With all reads of a layer begun, read the first experts of the next one."""
        following = ask.layer + 1
        if self._options.prefetch == "off" or following >= self._options.layers:
            return
        if ask.is_small or ask.unclaimed:
            return
        if ask.ahead is None:
            is_whole = ask.total >= LIKELY * len(self._own(ask.layer))
            ask.ahead = deque(self._own(following) if is_whole else ())
        room = books.free_staging - self._spare
        while room > 0 and ask.ahead:
            key = (following, ask.ahead.popleft())
            room -= self._read(books, [key], 1, lambda _layer, _expert: True)

    def _own(self, layer: int) -> list[int]:
        """Experts of a layer that can be asked for."""
        every = range(self._experts_of(layer))
        return [expert for expert in every if not self._options.is_elsewhere(layer, expert)]

    # ---- guesses ----

    def guesses_wanted(self, books: SlotBooks, layer: int, tokens: int) -> int:
        """How many experts of a layer its router should guess per token."""
        if self._options.prefetch != "gate" or not self._takes_guesses(books, layer, tokens):
            return 0
        return self._options.guesses

    def guess_by_pairs(self, books: SlotBooks, ask: Ask) -> None:
        """Guess for the next layer by what the experts of this one were followed by in a corpus."""
        options, following = self._options, ask.layer + 1
        if options.prefetch != "pairs" or options.pairs is None:
            return
        if self._takes_guesses(books, following, ask.tokens):
            found = options.pairs.likeliest(ask.layer, sorted(ask.wanted), options.guesses)
            if found:
                ask.guess = Guess.of(following, found)

    def read_guesses(self, books: SlotBooks, ask: Ask, asks: Iterable[Ask]) -> None:
        """Go on with the thread's guess if the reader has nothing else to do."""
        guess = ask.guess
        if guess is None or not guess.waiting or guess.layer == ask.layer:
            return
        if any(other.unclaimed for other in asks) or books.has_demanded_reading():
            return
        layer = guess.layer
        both = (ask.layer, layer)
        while guess.waiting:
            key = (layer, guess.waiting[0])
            is_absent = books.find(key) is None and key not in books.readings
            if is_absent and not self._options.is_elsewhere(*key):
                if not self._read_one(books, key, lambda at, _: at in both, self._spare):
                    return
                guess.begun.add(key)
            guess.waiting.popleft()

    def judge(self, books: SlotBooks, ask: Ask) -> None:
        """A layer asks: compare with what was guessed for it."""
        guess, ask.guess = ask.guess, None
        if guess is None:
            return
        if guess.layer != ask.layer:
            self._cancel(books, guess)
            return
        for expert in ask.wanted:
            key = (ask.layer, expert)
            if key in guess.begun or books.find(key) is None:
                self.guess_misses += 1
                self.guess_hits += expert in guess.experts

    def give_up(self, books: SlotBooks, ask: Ask) -> None:
        """The thread's forward is over: what was guessed is of no use."""
        guess, ask.guess = ask.guess, None
        if guess is not None:
            self._cancel(books, guess)

    def _takes_guesses(self, books: SlotBooks, layer: int, tokens: int) -> bool:
        """Whether a layer of the main model may ask for something that nobody is sure of."""
        if tokens > SMALL_TOKENS or layer >= self._options.layers or layer in self._tables:
            return False
        return books.count_of(layer) < self._experts_of(layer)

    def _cancel(self, books: SlotBooks, guess: Guess) -> None:
        for key in guess.begun:
            reading = books.readings.get(key)
            if reading is not None and not reading.claims:
                self._filler.cancel(reading)

    def _read_one(
        self,
        books: SlotBooks,
        key: Key,
        is_kept: Callable[[int, int], bool],
        spare: int | None = None,
    ) -> bool:
        """Begin to read an absent expert; False when there is no place, or it cannot be read."""
        reading = books.begin(key, is_kept, is_prefetch=True, spare=spare)
        if reading is None:
            return False
        self.begun += 1
        if self._filler.start(reading) is not None:
            books.give_up(key)  # who asks for it will hear why
            return False
        return True

    def _read(
        self,
        books: SlotBooks,
        keys: Sequence[Key],
        most: int,
        is_kept: Callable[[int, int], bool],
    ) -> int:
        """Begin to read what is neither there nor coming; returns how many reads began."""
        begun = 0
        for key in keys:
            if begun == most:
                break
            if books.find(key) is not None or key in books.readings:
                continue
            if not self._read_one(books, key, is_kept):
                break
            begun += 1
        return begun
