"""Routed experts in memory and on a drive: what is asked for often stays, the rest is read.

`ExpertStore` hands out experts in batches: first those in memory, then each as it arrives, so that
what is there is computed while the rest is read. A thread keeps what it was handed until it asks
for the next batch. A read goes on when the forward that wanted it ends, for whatever reason, and is
there for the next one.

An interrupt (Ctrl+C) may come in the middle of a change of the books. Whoever comes next notices,
ends all reads and begins with empty slots, but for those that other threads still use.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgedsv4.errors import CapacityError, ConfigError
from edgedsv4.formats.range_reader import RangeReader
from edgedsv4.model.hooks import MOST_GUESSES
from edgedsv4.runtime.read_ahead import ReadAhead
from edgedsv4.runtime.slot_bank import SlotBank
from edgedsv4.runtime.slot_books import Key, SlotBooks
from edgedsv4.runtime.slot_filler import SlotFiller, Verification
from edgedsv4.runtime.stats import ExpertStats
from edgedsv4.runtime.store_ask import Ask, Guess
from edgedsv4.runtime.store_plan import padded

if TYPE_CHECKING:
    from torch import Tensor

    from edgedsv4.config import Prefetch
    from edgedsv4.formats.next_pairs import NextPairs
    from edgedsv4.model.weights import ExpertWeights, RoutedExperts
    from edgedsv4.runtime.expert_cache import CachePolicy
    from edgedsv4.runtime.expert_files import ExpertFiles

WAIT_MS = 20
"""How long a wait goes on before somebody may stop it."""
GUESSES = 4
"""Experts that are guessed per token and layer: of V4's misses they cover about half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How a store is made."""

    slots: int
    """Experts that stay in memory."""
    staging: int
    """Further slots, for experts that only pass through."""
    policy: Callable[[], CachePolicy]
    """Makes the policy of an empty cache."""
    layers: int
    """Of the main model; what follows them is not read ahead."""
    tables: dict[int, Tensor] = field(default_factory=dict)
    """Layers whose experts follow from the token: int64 [V, k]."""
    depth: int = 32
    """Reads of 1 MiB under way at a time."""
    has_ring: bool = True
    """Read by io_uring where the kernel has it."""
    prefetch: Prefetch = "hash"
    """What is read before it is asked for; see `EngineOptions`."""
    guesses: int = GUESSES
    """Experts that are guessed per token and layer, 1..64."""
    pairs: NextPairs | None = None
    """Which experts follow which in a corpus, for `pairs`."""
    verification: Verification | None = None
    """Compare what was read with checksums."""
    is_elsewhere: Callable[[int, int], bool] = lambda _layer, _expert: False
    """Whether a (layer, expert) lives where this store is not asked for it, and is not read ahead.
    """


class ExpertStore:
    """The experts of one opened model; for any number of threads.

    A thread that streams or fetches outside a forward calls `end_forward` when it is through.

    Args:
        experts: of the model.
        files: opened for reading; closed with the store.
        options: sizes and ways.

    Raises:
        ConfigError: no slots, or guesses out of their range.
        CapacityError: the memory is not given.
        BackendUnavailableError: the reader cannot run here.
    """

    def __init__(self, experts: RoutedExperts, files: ExpertFiles, options: StoreOptions) -> None:
        if options.slots < 1 or options.staging < 0:
            raise ConfigError(f"a store needs at least 1 slot, found {options.slots}")
        if not 1 <= options.guesses <= MOST_GUESSES:
            raise ConfigError(f"guesses must be 1..{MOST_GUESSES}, found {options.guesses}")
        self.options = options
        self.slot_bytes = padded(files.object_bytes)
        self.bank = SlotBank(options.slots + options.staging, self.slot_bytes)
        self.reader = RangeReader(depth=options.depth, has_ring=options.has_ring, kept=self.bank)
        self._experts = experts
        self._files = files
        self._filler = SlotFiller(experts, files, self.bank, self.reader, options.verification)
        self._books = self._new_books(range(self.bank.slots), options.slots)
        self._ahead = ReadAhead(options, self._filler, experts.experts_of)
        self._lock = threading.Lock()
        self._local = threading.local()
        self._asks: set[Ask] = set()
        self._is_dirty = False
        names = ("ram_hits", "prefetch_hits", "prefetch_late", "disk_reads", "prefetch_wasted")
        self._counts = dict.fromkeys(names, 0)
        self._stall_seconds = 0.0

    @property
    def is_resident(self) -> bool:
        """Experts come and go."""
        return False

    @property
    def method(self) -> str:
        """How experts are read: `io_uring` or `threads`, direct or buffered."""
        return f"{self.reader.method}, {'direct' if self._files.is_direct else 'buffered'}"

    def check_unchanged(self) -> None:
        """Raise `FormatError` if a file that holds experts changed since it was opened."""
        self._experts.check_unchanged()

    def stats(self) -> ExpertStats:
        """Counts since the store was made."""
        with self._lock:
            counts = dict(self._counts)
            counts["prefetch_wasted"] += self._books.prefetch_wasted
            return ExpertStats(
                **counts,
                prefetched=self._ahead.begun,
                guess_misses=self._ahead.guess_misses,
                guess_hits=self._ahead.guess_hits,
                read_bytes=self._filler.read_bytes,
                stall_seconds=self._stall_seconds,
            )

    def resident(self) -> int:
        """Experts in memory now, apart from those that pass through."""
        with self._lock:
            return len(self._books.cache)

    def close(self) -> None:
        """End all reads and give files back; nothing may be asked for any more."""
        self.reader.close()
        self._files.close()

    # ---- forwards ----

    def begin_forward(self, token_ids: Sequence[int] | None) -> None:
        """Say which tokens come: what they are sure to need is read ahead.

        Args:
            token_ids: of the main model's next forward; None when nothing follows from them.
        """
        sure = set() if token_ids is None else self._ahead.sure(token_ids)
        if not sure:
            return
        with self._lock:
            find = self._books.find
            if not all(find(key) is not None for key in sure) and self._begin_change():
                self._ahead.read_sure(self._books, sure)
                self._is_dirty = False

    def guesses_wanted(self, layer: int, tokens: int) -> int:
        """How many experts the model should guess for each token of a layer."""
        return self._ahead.guesses_wanted(self._books, layer, tokens)

    def guess(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Read what a layer will probably ask for, once nothing else has to be read.

        Args:
            layer: the one after that which this thread streams.
            expert_ids: each once, the likeliest first.
        """
        ask: Ask | None = getattr(self._local, "ask", None)
        if ask is None:
            return
        with self._lock:
            if self._begin_change():
                ask.guess = Guess.of(layer, expert_ids)
                self._ahead.read_guesses(self._books, ask, self._asks)
                self._is_dirty = False

    def end_forward(self, tokens: int) -> None:
        """Nothing that was handed out to this thread is used any more.

        Args:
            tokens: by which counters age; 0 after a failure.
        """
        ask: Ask | None = getattr(self._local, "ask", None)
        with self._lock:
            if not self._is_dirty:
                self._is_dirty = True
                if ask is not None:
                    self._ahead.give_up(self._books, ask)
                    self._let_go(ask, is_over=True)
                if tokens:
                    self._books.cache.end_step(tokens)
                self._books.drop_staged(lambda _layer, _expert: False)
                self._is_dirty = False
            if ask is not None:
                self._asks.discard(ask)
                if self._asks:
                    self.reader.wake()
        self._local.ask = None

    def fetch(self, layer: int, expert_ids: Sequence[int]) -> list[ExpertWeights]:
        """Weights of some experts, all at once; they stay until this thread asks again.

        Raises:
            CapacityError: more experts than slots.
            ExpertReadError, FormatError: as `stream`.
        """
        distinct = len(set(expert_ids))
        if distinct > self.options.slots:
            raise CapacityError(
                f"{distinct} experts at once",
                needed_bytes=distinct * self.slot_bytes,
                available_bytes=self.options.slots * self.slot_bytes,
            )
        found: dict[int, ExpertWeights] = {}
        ask = self._new_ask(layer, expert_ids, 1)
        while ask.wanted:
            ready = self._step(ask, keeps_all=True)
            found.update(ready)
            if not ready:
                self._wait(ask)
        return [found[expert_id] for expert_id in expert_ids]

    def stream(
        self,
        layer: int,
        expert_ids: Sequence[int],
        tokens: int,
        check_stop: Callable[[], None],
    ) -> Iterator[Sequence[tuple[int, ExpertWeights]]]:
        """Hand out some experts of one layer in batches, each as soon as it can be used.

        The first batch is what is in memory and may be empty. A batch stays until the next one is
        asked for; the last until this thread asks for another layer or its forward ends.

        Args:
            layer: of the experts.
            expert_ids: which.
            tokens: of the evaluation.
            check_stop: called every 20 ms while nothing arrives; what it raises ends the stream.

        Raises:
            ExpertReadError: one cannot be read, or there is no such expert.
            FormatError: a file changed since it was opened.
        """
        ask = self._new_ask(layer, expert_ids, tokens)
        yield self._step(ask)
        while ask.wanted:
            ready = self._step(ask)
            if ready:
                yield ready
            else:
                check_stop()
                self._wait(ask)

    # ---- asking ----

    def _new_ask(self, layer: int, expert_ids: Sequence[int], tokens: int) -> Ask:
        """What this thread asks for now; what it asked for before is let go by the first step."""
        ask: Ask | None = getattr(self._local, "ask", None)
        if ask is None:
            ask = self._local.ask = Ask()
        ask.layer = layer
        ask.wanted = set(expert_ids)
        ask.total = len(ask.wanted)
        ask.tokens = tokens
        ask.is_counted = False
        return ask

    def _step(self, ask: Ask, *, keeps_all: bool = False) -> list[tuple[int, ExpertWeights]]:
        """What can be handed out now; reads begin for what cannot."""
        ready: list[tuple[int, ExpertWeights]] = []
        with self._lock:
            if not self._begin_change():
                return ready
            self._asks.add(ask)
            if not ask.is_counted:
                self._let_go(ask, is_over=True)
                # Under the lock: until here other threads saw what was asked for before.
                ask.unclaimed = deque(sorted(ask.wanted))
                ask.arrived.clear()
                ask.ahead = None
                ask.error = None
            elif not keeps_all:
                self._let_go(ask, is_over=False)
            self._collect()
            if not ask.is_counted:
                self._ahead.judge(self._books, ask)
                self._count(ask)
                self._ahead.guess_by_pairs(self._books, ask)
                self._find(ask, ready)
            for key in ask.arrived:
                self._hand_out(ask, key, ready)
            ask.arrived.clear()
            if ask.wanted or not ask.is_small:
                self._begin_reads(ask, ready)
                self._ahead.read_layer(self._books, ask)
                ask.seen = self._filler.look()
            self._ahead.read_guesses(self._books, ask, self._asks)
            self._stall_seconds += ask.stalled
            ask.stalled = 0.0
            self._is_dirty = False
        if ask.error is not None:
            self.end_forward(0)
            raise ask.error
        return ready

    def _count(self, ask: Ask) -> None:
        books, layer, wanted = self._books, ask.layer, ask.wanted
        weight = 1.0 if ask.is_small else 1.0 / ask.tokens
        books.cache.use(layer, sorted(wanted), weight)
        books.drop_staged(lambda at, expert: at != layer or expert in wanted)
        for reading in books.readings.values():
            at, expert = reading.key
            if at == layer and reading.claims == 0 and expert not in wanted:
                self._filler.cancel(reading)  # read ahead in vain
        hits = ahead = late = 0
        for expert in wanted:
            key = (layer, expert)
            if key in books.unused_prefetch or key in books.readings:
                ahead += 1
                late += key in books.readings
            elif books.find(key) is not None:
                hits += 1
        self._counts["ram_hits"] += hits
        self._counts["prefetch_hits"] += ahead
        self._counts["prefetch_late"] += late
        self._counts["disk_reads"] += len(wanted) - hits - ahead
        ask.is_counted = True

    def _find(self, ask: Ask, ready: list[tuple[int, ExpertWeights]]) -> None:
        """Hand out all that is in memory before anything is read, which could push it out."""
        absent: deque[int] = deque()
        for expert in ask.unclaimed:
            key = (ask.layer, expert)
            if self._books.find(key) is None:
                absent.append(expert)
            else:
                self._hand_out(ask, key, ready)
        ask.unclaimed = absent

    def _hand_out(self, ask: Ask, key: Key, ready: list[tuple[int, ExpertWeights]]) -> None:
        if key in self._books.unused_prefetch:
            self._admit(ask, key)
        slot = self._books.find(key)
        if slot is None:
            raise RuntimeError(f"expert {key} is claimed and gone")
        if key not in ask.claims:
            self._books.claim(key)
            ask.claims.add(key)
        ask.held[key] = slot
        ask.wanted.discard(key[1])
        ready.append((key[1], self._filler.record(slot)))

    def _admit(self, ask: Ask, key: Key) -> None:
        """What was read ahead and is used may have earned a place."""
        layer, wanted = ask.layer, ask.wanted
        self._books.admit(key, lambda at, other: at == layer and other in wanted)

    def _begin_reads(self, ask: Ask, ready: list[tuple[int, ExpertWeights]]) -> None:
        """Begin to read what is wanted, as far as there are slots."""
        books, layer, wanted = self._books, ask.layer, ask.wanted
        while ask.unclaimed:
            key = (layer, ask.unclaimed[0])
            reading = books.readings.get(key)
            if books.find(key) is not None:  # read for another thread meanwhile
                self._hand_out(ask, key, ready)
                ask.unclaimed.popleft()
                continue
            if reading is not None:
                if reading.is_prefetch:
                    self.reader.hurry(reading.job)
            else:
                reading = books.begin(key, lambda at, other: at == layer and other in wanted)
                if reading is None:
                    return
                error = self._filler.start(reading)
                if error is not None:
                    books.give_up(key)
                    ask.error = error
                    return
            books.claim(key)
            ask.claims.add(key)
            ask.unclaimed.popleft()

    def _collect(self) -> None:
        """Publish what has been read."""
        filled = self._filler.collect()
        for result in filled:
            key = result.reading.key
            asks = [ask for ask in self._asks if key in ask.claims]
            if result.is_good:
                self._books.publish(key)
                for ask in asks:
                    ask.arrived.append(key)
                if asks and result.reading.is_prefetch:
                    self._admit(asks[0], key)
                continue
            self._books.give_up(key)
            for ask in asks:  # they begin again, or hear of the error
                ask.claims.discard(key)
                ask.unclaimed.append(key[1])
                ask.error = ask.error or result.error
        if filled and len(self._asks) > 1:
            self.reader.wake()

    def _wait(self, ask: Ask) -> None:
        begin = time.perf_counter()
        self.reader.rest(ask.seen, WAIT_MS)
        ask.stalled += time.perf_counter() - begin

    def _let_go(self, ask: Ask, *, is_over: bool) -> None:
        """What was handed out last has been used; if it `is_over`, nothing else is waited for."""
        keys = ask.claims if is_over else ask.held
        if not (keys or ask.orphans):
            return
        for key in keys:
            self._books.release(key)
        if is_over:
            ask.claims.clear()
        else:
            ask.claims.difference_update(ask.held)
        ask.held.clear()
        for slot in ask.orphans:
            self._books.add_staging(slot)
        ask.orphans.clear()
        if len(self._asks) > 1:
            self.reader.wake()  # somebody may wait for a slot

    def _new_books(self, slots: Iterable[int], cached: int) -> SlotBooks:
        return SlotBooks(slots, cached, self.options.policy())

    def _all_gone(self) -> None:
        """Nobody may rely on what the cache held; see `WatchedStore`."""

    # ---- after an interrupt ----

    def _begin_change(self) -> bool:
        """Mark the books as being changed; False while they must be made anew and cannot yet."""
        if self._is_dirty and not self._start_anew():
            return False
        self._is_dirty = True
        return True

    def _start_anew(self) -> bool:
        """Empty books, after somebody was interrupted while changing them."""
        self._all_gone()
        own: Ask | None = getattr(self._local, "ask", None)
        others = [ask for ask in self._asks if ask is not own]
        used = {slot for ask in others for slot in (*ask.held.values(), *ask.orphans)}
        free = [slot for slot in range(self.bank.slots) if slot not in used]
        if used and len(free) <= self.bank.slots // 2:
            return False  # the others will be through soon
        self._filler.clear()
        self._counts["prefetch_wasted"] += self._books.prefetch_wasted
        cached = min(self.options.slots, len(free))
        self._books = self._new_books(free, cached)
        for ask in others:
            ask.orphans += ask.held.values()
        for ask in {*self._asks, *([] if own is None else [own])}:
            ask.held.clear()
            ask.claims.clear()
            ask.arrived.clear()
            ask.guess = None
            ask.unclaimed = deque(sorted(ask.wanted))
        if own is not None:
            own.orphans.clear()
        return True
