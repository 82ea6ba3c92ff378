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

from edgedsv4.errors import CapacityError, ConfigError, Dsv4Error
from edgedsv4.formats.range_reader import RangeReader
from edgedsv4.runtime.slot_bank import SlotBank
from edgedsv4.runtime.slot_books import Key, SlotBooks
from edgedsv4.runtime.slot_filler import SlotFiller, Verification
from edgedsv4.runtime.stats import ExpertStats
from edgedsv4.runtime.store_plan import padded

if TYPE_CHECKING:
    from torch import Tensor

    from edgedsv4.model.weights import ExpertWeights, RoutedExperts
    from edgedsv4.runtime.expert_cache import CachePolicy
    from edgedsv4.runtime.expert_files import ExpertFiles

SMALL_TOKENS = 16
"""Evaluations of more tokens are prefill, whose selections count for less."""
WAIT_MS = 20
"""How long a wait goes on before somebody may stop it."""
LIKELY = 0.9
"""Share of a layer's experts that an evaluation uses from which the next layer is read ahead."""


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
    has_prefetch: bool = True
    """Read what will be needed before it is asked for."""
    verification: Verification | None = None
    """Compare what was read with checksums."""


@dataclass(slots=True, eq=False)
class _Ask:
    """What one thread asked for and uses."""

    layer: int = -1
    wanted: set[int] = field(default_factory=set)
    """Not handed out yet."""
    total: int = 0
    tokens: int = 0
    is_counted: bool = False
    unclaimed: deque[int] = field(default_factory=deque)
    """Wanted, and neither found nor being read for this thread."""
    arrived: list[Key] = field(default_factory=list)
    """Claimed and published since the last step."""
    ahead: int = 0
    """Experts of the next layer that were considered for reading ahead."""
    claims: set[Key] = field(default_factory=set)
    held: dict[Key, int] = field(default_factory=dict)
    """Handed out: physical slots."""
    orphans: list[int] = field(default_factory=list)
    """Handed out, and left out when the books were made anew."""
    error: Dsv4Error | None = None
    seen: int = 0
    stalled: float = 0.0


class ExpertStore:
    """The experts of one opened model; for any number of threads.

    A thread that streams or fetches outside a forward calls `end_forward` when it is through.

    Args:
        experts: of the model.
        files: opened for reading; closed with the store.
        options: sizes and ways.

    Raises:
        ConfigError: no slots.
        CapacityError: the memory is not given.
        BackendUnavailableError: the reader cannot run here.
    """

    def __init__(self, experts: RoutedExperts, files: ExpertFiles, options: StoreOptions) -> None:
        if options.slots < 1 or options.staging < 0:
            raise ConfigError(f"a store needs at least 1 slot, found {options.slots}")
        self.options = options
        self.slot_bytes = padded(files.object_bytes)
        self.bank = SlotBank(options.slots + options.staging, self.slot_bytes)
        self.reader = RangeReader(depth=options.depth, has_ring=options.has_ring, kept=self.bank)
        self._experts = experts
        self._files = files
        self._filler = SlotFiller(experts, files, self.bank, self.reader, options.verification)
        self._books = self._new_books(range(self.bank.slots), options.slots)
        self._lock = threading.Lock()
        self._local = threading.local()
        self._asks: set[_Ask] = set()
        self._tables = {layer: table.numpy() for layer, table in options.tables.items()}
        self._is_dirty = False
        names = ("ram_hits", "prefetch_hits", "disk_reads", "prefetched", "prefetch_wasted")
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
        if token_ids is None or not (self.options.has_prefetch and self._tables):
            return
        rows = list(token_ids)
        sure = {
            (layer, expert)
            for layer, table in self._tables.items()
            for expert in table[rows].ravel().tolist()
        }
        with self._lock:
            find = self._books.find
            if not all(find(key) is not None for key in sure) and self._begin_change():
                # Half the slots at most, so that what is read ahead cannot push itself out.
                most = (self.options.slots + self.options.staging - 1) // 2
                self._prefetch(sorted(sure), most, lambda layer, expert: (layer, expert) in sure)
                self._is_dirty = False

    def end_forward(self, tokens: int) -> None:
        """Nothing that was handed out to this thread is used any more.

        Args:
            tokens: by which counters age; 0 after a failure.
        """
        ask: _Ask | None = getattr(self._local, "ask", None)
        with self._lock:
            if not self._is_dirty:
                self._is_dirty = True
                if ask is not None:
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

    def _new_ask(self, layer: int, expert_ids: Sequence[int], tokens: int) -> _Ask:
        """What this thread asks for now; what it asked for before is let go by the first step."""
        ask: _Ask | None = getattr(self._local, "ask", None)
        if ask is None:
            ask = self._local.ask = _Ask()
        ask.layer = layer
        ask.wanted = set(expert_ids)
        ask.total = len(ask.wanted)
        ask.tokens = tokens
        ask.is_counted = False
        return ask

    def _step(self, ask: _Ask, *, keeps_all: bool = False) -> list[tuple[int, ExpertWeights]]:
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
                ask.ahead = 0
                ask.error = None
            elif not keeps_all:
                self._let_go(ask, is_over=False)
            self._collect()
            if not ask.is_counted:
                self._count(ask)
                self._find(ask, ready)
            for key in ask.arrived:
                self._hand_out(ask, key, ready)
            ask.arrived.clear()
            if ask.wanted or ask.tokens > SMALL_TOKENS:
                self._begin_reads(ask, ready)
                self._look_ahead(ask)
                ask.seen = self._filler.look()
            self._stall_seconds += ask.stalled
            ask.stalled = 0.0
            self._is_dirty = False
        if ask.error is not None:
            self.end_forward(0)
            raise ask.error
        return ready

    def _count(self, ask: _Ask) -> None:
        books, layer, wanted = self._books, ask.layer, ask.wanted
        weight = 1.0 if ask.tokens <= SMALL_TOKENS else 1.0 / ask.tokens
        books.cache.use(layer, sorted(wanted), weight)
        books.drop_staged(lambda at, expert: at != layer or expert in wanted)
        for reading in books.readings.values():
            at, expert = reading.key
            if at == layer and reading.claims == 0 and expert not in wanted:
                self.reader.cancel(reading.job)  # read ahead in vain
        hits = ahead = 0
        for expert in wanted:
            key = (layer, expert)
            if key in books.unused_prefetch or key in books.readings:
                ahead += 1
            elif books.find(key) is not None:
                hits += 1
        self._counts["ram_hits"] += hits
        self._counts["prefetch_hits"] += ahead
        self._counts["disk_reads"] += len(wanted) - hits - ahead
        ask.is_counted = True

    def _find(self, ask: _Ask, ready: list[tuple[int, ExpertWeights]]) -> None:
        """Hand out all that is in memory before anything is read, which could push it out."""
        absent: deque[int] = deque()
        for expert in ask.unclaimed:
            key = (ask.layer, expert)
            if self._books.find(key) is None:
                absent.append(expert)
            else:
                self._hand_out(ask, key, ready)
        ask.unclaimed = absent

    def _hand_out(self, ask: _Ask, key: Key, ready: list[tuple[int, ExpertWeights]]) -> None:
        slot = self._books.find(key)
        if slot is None:
            raise RuntimeError(f"expert {key} is claimed and gone")
        if key not in ask.claims:
            self._books.claim(key)
            ask.claims.add(key)
        ask.held[key] = slot
        ask.wanted.discard(key[1])
        ready.append((key[1], self._filler.record(slot)))

    def _begin_reads(self, ask: _Ask, ready: list[tuple[int, ExpertWeights]]) -> None:
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
                if not result.reading.is_staged:
                    self._came(key, result.reading.slot)
                for ask in asks:
                    ask.arrived.append(key)
                continue
            self._books.give_up(key)
            for ask in asks:  # they begin again, or hear of the error
                ask.claims.discard(key)
                ask.unclaimed.append(key[1])
                ask.error = ask.error or result.error
        if filled and len(self._asks) > 1:
            self.reader.wake()

    def _wait(self, ask: _Ask) -> None:
        begin = time.perf_counter()
        self.reader.rest(ask.seen, WAIT_MS)
        ask.stalled += time.perf_counter() - begin

    def _let_go(self, ask: _Ask, *, is_over: bool) -> None:
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

    # ---- reading ahead ----

    def _prefetch(self, keys: Sequence[Key], most: int, is_kept: Callable[[int, int], bool]) -> int:
        """Begin to read what is neither there nor coming; returns how many reads began."""
        books, begun = self._books, 0
        for key in keys:
            if begun == most:
                break
            if books.find(key) is not None or key in books.readings:
                continue
            reading = books.begin(key, is_kept, is_prefetch=True)
            if reading is None:
                break
            if self._filler.start(reading) is not None:
                books.give_up(key)  # who asks for it will hear why
                break
            begun += 1
        self._counts["prefetched"] += begun
        return begun

    def _look_ahead(self, ask: _Ask) -> None:
        """With all reads of a layer begun, read the first experts of the next one."""
        following, count = ask.layer + 1, self._experts.experts_of(ask.layer)
        is_whole = ask.tokens > SMALL_TOKENS and ask.total >= LIKELY * count
        if not (is_whole and self.options.has_prefetch and following < self.options.layers):
            return
        if ask.unclaimed or ask.ahead == count:
            return
        room = self._books.free_staging - self.options.staging // 2
        while room > 0 and ask.ahead < count:
            key = (following, ask.ahead)
            room -= self._prefetch([key], 1, lambda _layer, _expert: True)
            ask.ahead += 1

    def _new_books(self, slots: Iterable[int], cached: int) -> SlotBooks:
        return SlotBooks(slots, cached, self.options.policy())

    def _came(self, key: Key, slot: int) -> None:
        """An expert stays in a slot of the cache from now on; see `WatchedStore`."""

    def _all_gone(self) -> None:
        """Nobody may rely on what the cache held."""

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
        own: _Ask | None = getattr(self._local, "ask", None)
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
            ask.unclaimed = deque(sorted(ask.wanted))
        if own is not None:
            own.orphans.clear()
        return True
