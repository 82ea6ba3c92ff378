"""Which rows and experts a forward selects: recorded, compared, and forced to somebody else's.

A random model is chaotic: one compressed row or expert chosen otherwise moves later logits by order
1. So a comparison first asks whether selections differ, and if so whether the scores were as good
as tied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from edgedsv4.model.hooks import ForwardHooks

if TYPE_CHECKING:
    from edgedsv4.model.kv_cache import KvCache

NEAR_TIE = 1e-5
"""Scores closer than this may be ranked either way by another order of summation."""


@dataclass(frozen=True)
class Flip:
    """A row whose selection differs from the expected one."""

    layer: int
    position: int
    gap: float
    """By how much the best row chosen against expectation beats the worst one left out."""

    @property
    def is_near_tie(self) -> bool:
        """The scores do not tell which selection is right."""
        return abs(self.gap) < NEAR_TIE


def membership(ids: torch.Tensor, width: int) -> torch.Tensor:
    """[T, k] ids (-1 for none) as [T, width] booleans."""
    rows = torch.zeros(ids.shape[0], width + 1, dtype=torch.bool)
    rows.scatter_(1, torch.where(ids < 0, width, ids), torch.ones_like(ids, dtype=torch.bool))
    return rows[:, :width]


@dataclass
class ForcedSelections:
    """Replaces selections by expected ones, for one prefill that starts at position 0.

    Rows that agree are left exactly as they are, so a run without flips is the free run.

    Attributes:
        topk: layer -> expected compressed rows [T, k].
        experts: layer -> expected experts [T, k].
        flips: every row that differed, given that all selections before it were the expected ones.
    """

    topk: Mapping[int, torch.Tensor]
    experts: Mapping[int, torch.Tensor]
    flips: list[Flip] = field(default_factory=list)

    def hooks(self) -> ForwardHooks:
        """The hooks to pass to the forward."""
        return ForwardHooks(
            on_topk=lambda layer, scores, ids: self._force(self.topk, layer, scores, ids),
            on_experts=lambda layer, scores, ids: self._force(self.experts, layer, scores, ids),
        )

    def _force(
        self,
        expected: Mapping[int, torch.Tensor],
        layer: int,
        scores: torch.Tensor,
        ids: torch.Tensor,
    ) -> torch.Tensor:
        if layer not in expected:
            return ids
        theirs = expected[layer]
        ours_in, theirs_in = (membership(i, scores.shape[1]) for i in (ids, theirs))
        differing = (ours_in != theirs_in).any(dim=1).nonzero().flatten().tolist()
        result = ids.clone()
        for row in differing:
            chosen = scores[row][ours_in[row] & ~theirs_in[row]]
            missed = scores[row][theirs_in[row] & ~ours_in[row]]
            same_count = len(chosen) == len(missed)
            gap = float(chosen.max() - missed.min()) if same_count else float("inf")
            self.flips.append(Flip(layer, row, gap))
            result[row] = theirs[row]
        return result


@dataclass
class SelectionRecord:
    """What every position selected, whatever the chunks were.

    Attributes:
        topk: (layer, position) -> ids of compressed rows; only where some were left out.
        experts: (layer, position) -> expert ids.
        margins: (kind, layer, position) -> score of the worst chosen minus the best left out.
    """

    cache: KvCache
    topk: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)
    experts: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)
    margins: dict[tuple[str, int, int], float] = field(default_factory=dict)

    def hooks(self) -> ForwardHooks:
        """The hooks to pass to every forward on `cache`."""
        return ForwardHooks(on_topk=self._on_topk, on_experts=self._on_experts)

    def _on_topk(self, layer: int, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        visible = (scores > -torch.inf).sum(dim=1)
        left_out = (visible > ids.shape[1]).nonzero().flatten().tolist()
        self._keep("topk", layer, scores, ids, left_out)
        return ids

    def _on_experts(self, layer: int, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self._keep("experts", layer, scores, ids, list(range(ids.shape[0])))
        return ids

    def _keep(
        self, kind: str, layer: int, scores: torch.Tensor, ids: torch.Tensor, rows: list[int]
    ) -> None:
        chosen = membership(ids, scores.shape[1])
        worst = scores.masked_fill(~chosen, torch.inf).amin(dim=1)
        best_left = scores.masked_fill(chosen, -torch.inf).amax(dim=1)
        store = self.topk if kind == "topk" else self.experts
        for row in rows:
            position = self.cache.length + row
            store[layer, position] = frozenset(ids[row].tolist())
            self.margins[kind, layer, position] = float(worst[row] - best_left[row])
