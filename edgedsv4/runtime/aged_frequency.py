"""The policy that the program uses: keep the experts that are expected to be used the most.

How often an expert was used lately says how often it will be used, but what "lately" should mean
depends on the text: one long document wants thousands of tokens, a change of subject wants ten, a
loop wants the opposite of recency. So several readings are taken of every expert of the model,
resident or not: its uses per token averaged over half-lives of 4, 32, 256 and 4,096 tokens, how
recent its last use is, and its rate in a frequency file where there is one. What they are worth is
measured while the model runs, by least squares: the weights are those under which the sum of the
readings would have predicted, over the last few hundred tokens, each expert's discounted future use

    V[t] = x[t] . w,   V[t] ~ used[t + 1] + GAMMA V[t + 1]

(least-squares temporal differences). Experts are weighted by how close they are to the border of
being kept, since only there the prediction decides anything. There is nothing to tune: on a steady
text this becomes counting, where subjects change it is nearly LRU, and on a cyclic scan recency
gets a negative weight, which is what the best offline policy does.

Half-lives are counted in tokens of decode. A step ages by its tokens times the mean weight of its
selections, so a prefill chunk of T tokens whose selections weigh 1/T counts as one token.

Cost: readings are arrays over all experts (V4-Flash: 11,008) that are touched once per step. The
victims of a step come off a heap of the lowest values, made when the first one is needed; whoever
is used or inserted later in the step goes back into it with a new value. A token of V4-Flash with
77 misses takes 0.7 ms of one busy core, LRU's books 0.4 (`tests/bench/bench_expert_cache.py`).

What it is worth, in hit rate at 15, 30 and 50 % resident, against the better of LRU and SGLang's
counters: 4 to 20 points more on the recorded routes of the pocket models; up to 6 more on made-up
conversations; equal within 0.3 points where there is nothing to learn (`uniform`) and within 0.15
where LRU or counting is already right. On Zipf's law it reaches 0.88 of Belady's bound or more.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import ShapeError
from edgedsv4.runtime.expert_cache import EXPERT_BITS, expert_of

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

HALF_LIVES = (4.0, 32.0, 256.0, 4096.0)
"""Tokens after which a use counts half, of each average."""
RECENCY = 16.0
"""Tokens after the last use at which the reading of recency is down to a half."""
HYSTERESIS = 1.2
"""A newcomer that may be refused must be worth so much more than the victim."""
GAMMA = 0.5
"""How much a use one token later counts."""
MEMORY = 512.0
"""Half-life of what the weights are learned from, tokens."""
LEARNED_EXPERTS = 2048
"""Experts that the weights are learned from at most, spread over all layers."""
SOLVE_EVERY = 8
"""Steps between two updates of the weights."""
_RIDGE = 1e-3
_LEAST_BORDER = 1e-4
_LEAST_RANKED = 128
_NEVER = 1e6
_AVERAGES = len(HALF_LIVES)
_SLOWEST = _AVERAGES - 1
_PRIOR = _AVERAGES + 1


class AgedFrequency:
    """Keeps the experts with the highest expected use; see the module.

    Args:
        layers: with routed experts, a draft block's included.
        experts: routed experts per layer.
        prior: [up to layers, experts], uses per token in a corpus, from a frequency file; None
            without. Layers that it leaves out, as a draft block's, get the average of the others.

    Raises:
        ShapeError: `prior` has another shape.
    """

    def __init__(self, layers: int, experts: int, prior: Doubles | None = None) -> None:
        count = layers * experts
        if prior is not None:
            prior = _for_all_layers(prior, layers, experts)
        self._layers = layers
        self._experts = experts
        self._readings = _Readings(count, prior)
        self._weights = _Weights(len(self._readings.rows), count)
        self._is_resident = np.zeros(count, dtype=bool)
        self._members: set[int] = set()
        self._uses: dict[int, float] = {}  # of this step
        self._selections = 0
        self._mass = 0.0
        self._touched: set[int] = set()  # used since the heap was made
        self._heap: list[tuple[float, int]] = []  # (value, key) of the residents that may go first
        self._again: set[int] = set()  # keys whose entry has their value after `_touched`
        self._highest = -math.inf
        """Residents of lower value than this are all in the heap."""
        self._base: Floats | None = None
        """Values of all experts when the heap was made."""

    def used(self, keys: Sequence[int], weight: float) -> None:
        """Note selections; they are counted at the end of the step."""
        uses = self._uses
        for key in keys:
            uses[key] = uses.get(key, 0.0) + weight
        self._touched.update(keys)
        self._selections += len(keys)
        self._mass += len(keys) * weight

    def inserted(self, key: int) -> None:
        """An expert is in the cache."""
        self._members.add(key)
        self._is_resident[self._place(key)] = True
        if self._base is not None:
            self._again.add(key)
            heapq.heappush(self._heap, (self._value(key), key))

    def removed(self, key: int) -> None:
        """An expert is gone."""
        self._members.discard(key)
        self._is_resident[self._place(key)] = False

    def make_room(
        self, newcomer: int, is_protected: Callable[[int], bool], *, may_refuse: bool
    ) -> int | None:
        """The expert with the lowest expected use.

        With `may_refuse` None also means that the newcomer's expected use is not `HYSTERESIS` times
        the victim's.
        """
        found = self._lowest(is_protected)
        if found is None:
            return None
        value, victim = found
        if may_refuse and self._value(newcomer) <= value + (HYSTERESIS - 1.0) * abs(value):
            heapq.heappush(self._heap, found)
            return None
        self.removed(victim)
        return victim

    def end_step(self, tokens: int) -> None:
        """Count the step's selections, learn from them, and age."""
        if tokens < 1 or not self._selections:
            return
        age = tokens * self._mass / self._selections
        self._weights.learn(self._readings, self._uses_by_place(), age, len(self._members))
        self._uses.clear()
        self._selections, self._mass = 0, 0.0
        # Ranked when the next victim is needed, since every value is another now.
        self._base = None

    def best(self, count: int) -> Iterator[tuple[int, int]]:
        """(layer, expert) of the highest expected uses, best first; evenly by layer among equals.

        What is worth reading before the first token, by the frequency file.
        """
        values = self._values().reshape(self._layers, self._experts)
        order = np.argsort(-values.T.reshape(-1), kind="stable")[:count]
        for place in order.tolist():
            yield place % self._layers, place // self._layers

    def _lowest(self, is_protected: Callable[[int], bool]) -> tuple[float, int] | None:
        """Take the resident of the lowest value that is not protected off the heap."""
        if self._base is None:
            self._rank()
        found = self._pop(is_protected)
        if found is None or found[0] > self._highest:
            self._rank()
            found = self._pop(is_protected)
        if found is None and self._highest < math.inf:
            self._rank(everyone=True)
            found = self._pop(is_protected)
        return found

    def _pop(self, is_protected: Callable[[int], bool]) -> tuple[float, int] | None:
        heap, passed = self._heap, []
        found = None
        while heap:
            entry = heapq.heappop(heap)
            key = entry[1]
            if key not in self._members:
                continue
            if key in self._touched and key not in self._again:
                self._again.add(key)
                heapq.heappush(heap, (self._value(key), key))
            elif is_protected(key):
                passed.append(entry)
            else:
                found = entry
                break
        for entry in passed:
            heapq.heappush(heap, entry)
        return found

    def _rank(self, *, everyone: bool = False) -> None:
        """Make the heap of the residents of the lowest values, with what this step used so far."""
        values = self._values()
        places = np.flatnonzero(self._is_resident)
        own = values[places]
        wanted = max(_LEAST_RANKED, len(places) // 8)
        self._highest = math.inf
        if wanted < len(places) and not everyone:
            lowest = np.argpartition(own, wanted)[:wanted]
            places, own = places[lowest], own[lowest]
            self._highest = float(own.max())
        order = np.argsort(own, kind="stable")  # ascending, which is a heap
        layers, ids = np.divmod(places[order], self._experts)
        keys = (layers << EXPERT_BITS | ids).tolist()
        self._heap = list(zip(own[order].tolist(), keys, strict=True))
        self._base = values
        self._touched.clear()
        self._again.clear()

    def _value(self, key: int) -> float:
        """Expected use of an expert as of now, without the little that a token takes from all."""
        if self._base is None:
            self._rank()
        place = self._place(key)
        value = float(self._base[place])  # type: ignore[index]  # made by _rank
        if key in self._touched:
            value += self._readings.gain_of_use(place, self._weights.current, self._uses[key])
        return value

    def _values(self) -> Floats:
        """Expected use of every expert, with what this step used so far, [L E]."""
        values = self._weights.current @ self._readings.rows
        if self._uses:
            places, uses = self._uses_by_place()
            values[places] += self._readings.gains_of_use(places, self._weights.current, uses)
        return values

    def _uses_by_place(self) -> tuple[npt.NDArray[np.int64], Doubles]:
        """Places used in this step, each once, and the weight of their selections."""
        keys = np.fromiter(self._uses.keys(), dtype=np.int64, count=len(self._uses))
        layers, ids = keys >> EXPERT_BITS, keys & ((1 << EXPERT_BITS) - 1)
        weights = np.fromiter(self._uses.values(), dtype=np.float64, count=len(self._uses))
        return layers * self._experts + ids, weights

    def _place(self, key: int) -> int:
        layer, expert = expert_of(key)
        return layer * self._experts + expert


def _for_all_layers(prior: Doubles, layers: int, experts: int) -> Doubles:
    """The rates of a frequency file with a row for every layer."""
    if prior.ndim != 2 or not 1 <= len(prior) <= layers or prior.shape[1] != experts:
        raise ShapeError(f"the frequencies are {list(prior.shape)}, expected [{layers}, {experts}]")
    missing = np.full((layers - len(prior), experts), prior.mean())
    return np.concatenate([prior, missing])


class _Readings:
    """What is known of every expert, one row per reading and one column per expert."""

    def __init__(self, count: int, prior: Doubles | None) -> None:
        readings = _AVERAGES + 1 + (prior is not None)
        self.rows = np.zeros((readings, count), dtype=np.float32)
        """[readings, L E]: averages (uses per token), recency (0..1), prior (uses per token)."""
        if prior is not None:
            self.rows[_PRIOR] = prior.reshape(count)
        self._half_lives = np.array(HALF_LIVES)
        self._sums = np.zeros((_AVERAGES, count), dtype=np.float32)
        self._mass = np.zeros(_AVERAGES)  # what a constant 1 would have summed up to
        self._idle = np.full(count, _NEVER, dtype=np.float32)  # tokens since the last use
        self._gain_now: float | None = None
        self.rows[_AVERAGES] = RECENCY / (RECENCY + _NEVER)

    def step(self, places: npt.NDArray[np.int64], uses: Doubles, age: float) -> None:
        """Let `age` tokens pass, in which experts at `places` were used."""
        self._gain_now = None
        kept = np.exp2(-age / self._half_lives)
        self._sums *= kept[:, None].astype(np.float32)
        self._sums[:, places] += ((1.0 - kept) / age)[:, None] * uses
        self._mass = self._mass * kept + (1.0 - kept)
        np.multiply(
            self._sums, (1.0 / self._mass)[:, None].astype(np.float32), out=self.rows[:_AVERAGES]
        )
        self._idle += np.float32(age)
        self._idle[places] = 0.0
        np.divide(np.float32(RECENCY), self._idle + np.float32(RECENCY), out=self.rows[_AVERAGES])

    def gains_of_use(
        self, places: npt.NDArray[np.int64], weights: Floats, uses: Doubles
    ) -> Doubles:
        """How much value so many uses give to the experts at `places`, [n]."""
        recency = weights[_AVERAGES] * (1.0 - self.rows[_AVERAGES, places])
        gains: Doubles = uses * self._gain(weights) + recency
        return gains

    def gain_of_use(self, place: int, weights: Floats, uses: float) -> float:
        """The same for one expert, in a fraction of the time."""
        recency = float(weights[_AVERAGES]) * (1.0 - float(self.rows[_AVERAGES, place]))
        return uses * self._gain(weights) + recency

    def _gain(self, weights: Floats) -> float:
        """Value of one use through the averages."""
        if self._gain_now is None:
            kept = np.exp2(-1.0 / self._half_lives)
            shares = (1.0 - kept) / (self._mass * kept + (1.0 - kept))
            self._gain_now = float(weights[:_AVERAGES] @ shares)
        return self._gain_now


class _Weights:
    """What each reading is worth, learned by least-squares temporal differences."""

    def __init__(self, readings: int, count: int) -> None:
        self._start = np.zeros(readings)
        self._start[_SLOWEST] = 1.0
        self._start[_PRIOR:] = 1.0
        self.current = self._start.astype(np.float32)
        """[readings]"""
        self._every = -(-count // LEARNED_EXPERTS)
        self._products = np.zeros((readings, readings))
        self._targets = np.zeros(readings)
        self._count = count
        self._steps = 0

    def learn(
        self,
        readings: _Readings,
        used: tuple[npt.NDArray[np.int64], Doubles],
        age: float,
        residents: int,
    ) -> None:
        """Take a step with the readings, and learn from how they would have predicted it."""
        places, uses = used
        before = readings.rows[:, :: self._every].copy()
        readings.step(places, uses, age)
        after = readings.rows[:, :: self._every]
        target = np.zeros(before.shape[1], dtype=np.float32)
        is_learned = places % self._every == 0
        target[places[is_learned] // self._every] = uses[is_learned] / age
        weighted = before * self._importance(before, residents)
        kept = 0.5 ** (age / MEMORY)
        self._products *= kept
        self._products += weighted @ (before - np.float32(GAMMA**age) * after).T
        self._targets = self._targets * kept + weighted @ target
        self._steps += 1
        if self._steps % SOLVE_EVERY == 0:
            self._solve()

    def _importance(self, rows: Floats, residents: int) -> Floats:
        """How much an expert's error matters: most where it is decided who stays, [n]."""
        values = self.current @ rows
        place = len(values) - 1 - min(len(values) - 1, residents * len(values) // self._count)
        border = max(float(np.partition(values, place)[place]), _LEAST_BORDER)
        share = np.float32(border) / (np.maximum(values, 0.0) + np.float32(border))
        squared: Floats = share * share
        return squared

    def _solve(self) -> None:
        """The weights of least squares, drawn a little towards those at the start."""
        ridge = _RIDGE * np.abs(np.diag(self._products)) + 1e-12
        start = self._start / (1.0 - GAMMA)
        try:
            found = np.linalg.solve(self._products + np.diag(ridge), self._targets + ridge * start)
        except np.linalg.LinAlgError:
            return  # the readings do not tell the weights apart yet
        if np.isfinite(found).all():
            self.current = found.astype(np.float32)
