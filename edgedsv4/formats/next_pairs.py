"""Which experts of the next layer follow an expert in a corpus: a part of frequency files.

For each expert of each layer but the last the same number of experts of the next layer, those that
were most often chosen for the same token. In a frequency file of version 2:

    next  {"per_expert": n, "experts": [L - 1][E n], "counts": [L - 1][E n]}

Row l holds n experts of layer l + 1 for every expert of layer l, one after another, and how often
each was chosen together with it; n is 1..`MOST_PER_EXPERT`. The n of an expert differ from each
other; one with the count 0 says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import ConfigError
from edgedsv4.formats.faults import FaultList, quoted

if TYPE_CHECKING:
    from edgedsv4.formats.strict_json import JsonValue

Counts = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int32]

MOST_PER_EXPERT = 16
MOST_TABLE = 1 << 27
"""Numbers in a table of all pairs of experts, [L - 1, E, E]."""


@dataclass(frozen=True, slots=True, eq=False)
class NextPairs:
    """The experts that most often follow each expert."""

    experts: Ids
    """[L - 1, E, n]"""
    counts: Counts
    """[L - 1, E, n], tokens for which both were chosen."""
    uses: Counts
    """[L - 1, E], how often the expert was chosen."""

    def likeliest(self, layer: int, chosen: Sequence[int], most: int) -> list[int]:
        """Experts of the next layer by the sum of their shares, the likeliest first.

        Args:
            layer: that chose.
            chosen: its experts.
            most: of the next layer's at most.

        Returns:
            Fewer where the table says nothing; none for the last layer.
        """
        if not 0 <= layer < len(self.experts):
            return []
        picked = list(chosen)
        uses = np.maximum(self.uses[layer, picked], 1).astype(np.float64)
        # Uses of a layer that routes by a table may be those of another text.
        shares = np.minimum(self.counts[layer, picked] / uses[:, None], 1.0)
        followers = self.experts[layer, picked].reshape(-1)
        scores = np.bincount(followers, weights=shares.reshape(-1))
        order = np.argsort(-scores, kind="stable")[:most]
        found: list[int] = order[scores[order] > 0].tolist()
        return found

    def to_json(self) -> dict[str, object]:
        """As it stands in a file."""
        layers = len(self.experts)
        return {
            "per_expert": self.experts.shape[2],
            "experts": self.experts.reshape(layers, -1).tolist(),
            "counts": self.counts.reshape(layers, -1).tolist(),
        }


class PairCounter:
    """Counts which experts of the next layer are chosen together with each expert.

    Args:
        layers: L, at least 2.
        experts: E.

    Raises:
        ConfigError: one layer alone, or a table that is too large to count in.
    """

    def __init__(self, layers: int, experts: int) -> None:
        size = (layers - 1) * experts * experts
        if not 0 < size <= MOST_TABLE:
            raise ConfigError(
                f"pairs of {layers} x {experts} experts cannot be counted: expected at least two"
                f" layers and a table of at most {MOST_TABLE:,} numbers, found {size:,}"
            )
        self._table = np.zeros((layers - 1, experts, experts), dtype=np.uint32)

    def add(self, ids: npt.NDArray[np.int64]) -> None:
        """Count the experts [T, L, k] of some tokens."""
        for layer, table in enumerate(self._table):
            before, after = ids[:, layer, :, None], ids[:, layer + 1, None, :]
            np.add.at(table, (before, after), 1)

    def pairs(self, per_expert: int, counts: Counts) -> NextPairs:
        """The most frequent pairs so far.

        Args:
            per_expert: how many for each expert, at most E.
            counts: [L, E], how often each expert was chosen.
        """
        order = np.argsort(-self._table.astype(np.int64), axis=2, kind="stable")
        experts = order[:, :, :per_expert].astype(np.int32)
        found = np.take_along_axis(self._table, order[:, :, :per_expert], axis=2)
        return NextPairs(experts, found.astype(np.uint64), counts[:-1])


def parse_next_pairs(
    faults: FaultList, value: JsonValue, counts: Counts, tokens: int
) -> NextPairs | None:
    """The pairs of a frequency file; None after a fault.

    Args:
        faults: told what is wrong.
        value: of the key `next`.
        counts: [L, E], checked.
        tokens: that were counted.
    """
    if not isinstance(value, dict) or value.keys() != {"per_expert", "experts", "counts"}:
        faults.add(f"next must have per_expert, experts and counts, found {quoted(value)}")
        return None
    layers, width = counts.shape
    per_expert, most = value["per_expert"], min(MOST_PER_EXPERT, width)
    if type(per_expert) is not int or not 1 <= per_expert <= most:
        faults.add(f"next per_expert must be a number 1..{most}, found {quoted(per_expert)}")
        return None
    size = width * per_expert
    ids = _table(faults, value["experts"], "experts", (layers - 1, size, width - 1))
    found = _table(faults, value["counts"], "counts", (layers - 1, size, tokens))
    if ids is None or found is None:
        return None
    shape = (layers - 1, width, per_expert)
    experts, together = ids.reshape(shape).astype(np.int32), found.reshape(shape)
    ordered = np.sort(experts, axis=2)
    if bool((ordered[:, :, 1:] == ordered[:, :, :-1]).any()):
        faults.add("next experts name one twice for the same expert")
    return NextPairs(experts, together, counts[:-1])


def _table(
    faults: FaultList, value: JsonValue, name: str, limits: tuple[int, int, int]
) -> Counts | None:
    """Rows of whole numbers; limits are rows, numbers per row, and the largest number."""
    rows, size, largest = limits
    if not isinstance(value, list) or len(value) != rows or not rows:
        faults.add(f"next {name} must have {rows} rows, one for each layer but the last")
        return None
    for layer, row in enumerate(value):
        if not isinstance(row, list) or len(row) != size:
            faults.add(f"next {name} of layer {layer} are not {size} numbers")
            return None
        if not all(type(number) is int and 0 <= number <= largest for number in row):
            faults.add(f"next {name} of layer {layer} hold something else than 0..{largest}")
            return None
    return np.array(value, dtype=np.uint64)
