"""How good guesses at the next layer's experts would have been: counted while a trace is replayed.

A guess is judged when its layer asks: which absent experts it named, and which it would have read
in vain, for its first one, two, and so on. Nothing is read for it, so the caches are those of a
replay without guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgedsv4.formats.route_trace import NO_GUESS

if TYPE_CHECKING:
    from edgedsv4.formats.next_pairs import NextPairs
    from edgedsv4.formats.route_trace import RouteTrace


@dataclass(slots=True)
class GuessCounts:
    """What guesses would have been worth over the decoded tokens of a replay."""

    tokens: int = 0
    misses: dict[int, int] = field(default_factory=dict)
    """By layer with guesses: experts that no tier had."""
    named: dict[int, list[int]] = field(default_factory=dict)
    """By layer: those of them that the first guess, the first two, ... named."""
    reads: list[int] = field(default_factory=list)
    """Absent experts that the first guess, the first two, ... named."""

    def judge(self, layer: int, wanted: set[int], guess: Sequence[int], absent: set[int]) -> None:
        """Count a guess.

        Args:
            layer: that asks.
            wanted: its experts.
            guess: at them, the likeliest first; one that is named again counts once.
            absent: those of both that no tier has.
        """
        guess, missing = list(dict.fromkeys(guess)), wanted & absent
        self.misses[layer] = self.misses.get(layer, 0) + len(missing)
        named = self.named.setdefault(layer, [])
        while len(named) < len(guess):
            named.append(named[-1] if named else 0)
        while len(self.reads) < len(guess):
            self.reads.append(self.reads[-1] if self.reads else 0)
        found = read = 0
        for place in range(max(len(named), len(self.reads))):
            if place < len(guess):
                found += guess[place] in missing
                read += guess[place] in absent
            if place < len(named):
                named[place] += found
            if place < len(self.reads):
                self.reads[place] += read

    def recall(self, most: int, layer: int | None = None) -> float:
        """Share of the misses, of all layers with guesses or of one, that `most` guesses named."""
        layers = list(self.misses) if layer is None else [layer]
        misses = sum(self.misses[n] for n in layers)
        return sum(self._named(n, most) for n in layers) / misses if misses else 0.0

    def wasted(self, most: int) -> float:
        """Reads in vain for each one that is of use; 0 where none is."""
        useful = sum(self._named(layer, most) for layer in self.misses)
        return (self.reads[most - 1] - useful) / useful if useful else 0.0

    def to_json(self) -> dict[str, object]:
        """The figures as JSON types, one of each list for 1, 2, ... guesses."""
        counts = range(1, len(self.reads) + 1)
        per_token = 1.0 / max(self.tokens, 1)
        return {
            "misses_per_token": round(sum(self.misses.values()) * per_token, 4),
            "recall": [round(self.recall(most), 6) for most in counts],
            "reads_per_token": [round(count * per_token, 4) for count in self.reads],
            "wasted_per_useful": [round(self.wasted(most), 6) for most in counts],
            "recall_by_layer": {
                str(layer): [round(self.recall(most, layer), 6) for most in counts]
                for layer in sorted(self.misses)
            },
        }

    def _named(self, layer: int, most: int) -> int:
        named = self.named[layer]
        return named[min(most, len(named)) - 1] if named else 0


Guesser = Callable[[int, int], "Sequence[int] | None"]
"""(token, layer) -> the guess, the likeliest first; None where there is none."""


def guesser_of(trace: RouteTrace, pairs: NextPairs | None, most: int) -> Guesser | None:
    """What guesses while a trace is replayed; None where nothing does.

    Args:
        trace: with or without guesses of its own.
        pairs: guess by these instead.
        most: experts that pairs guess.
    """
    if pairs is not None:

        def by_pairs(token: int, layer: int) -> Sequence[int] | None:
            if layer == 0:
                return None
            return pairs.likeliest(layer - 1, trace.ids[token, layer - 1].tolist(), most)

        return by_pairs
    guesses = trace.guesses
    if guesses is None:
        return None

    def by_trace(token: int, layer: int) -> Sequence[int] | None:
        found: list[int] = guesses[token, layer].tolist()
        return None if found[0] == NO_GUESS else found

    return by_trace
