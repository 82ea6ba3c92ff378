"""How far a text may depend on where routed experts are computed: the tolerance of `auto`.

`off` and `on` are bitwise independent of the placement. With `auto` an expert is computed by the
card or by the CPU, whose float32 sums have different orders, and a reply may take another turn
where two tokens are nearly equally likely: there the distance of the best logit from the next one
is below `GAPS`. The same holds for `auto` beside `on` and beside `off`.

Where the figures come from: logits behind 520 tokens of pocket-v4 (8 experts) and of its variant of
16, as stored (MXFP4) and with experts of Q2_K, for `on` and for `auto` with 0, k, 1/4, 1/2, 3/4 and
all of the experts on the card, the prompt's on either; the C kernels beside the card's arithmetic
in torch. Logits have a standard deviation of 4 to 5.

- `exact`: any two placements differed by at most 5.7e-5 in any logit. The card's own products are
  sums of two half floats (22 bits), so the limit is nine times that; a CPU whose results are wrong
  by 1e-4 changes logits by 1.9e-3 to 2.8e-2.
- `default`: rows are stored as FP8 and index keys as FP4, and what lies in the middle of two codes
  goes either way. So a difference of 1e-7 in the experts has the same effect as one of 1e-3: 0.15
  in the median row, jumps up to 9 where an expert changes, 1e-4 to 4.1e-3 nats of mean KL. Equal
  roundings of the experts' inputs cannot lower that, only equal bits could. Texts first differed
  at gaps up to 0.14; the largest gap of any row with another best token was 1.75. Results wrong by
  30 % cost 3.6e-2 nats or more; smaller faults are for `exact` and for tests of single tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from edgedsv4.config import Profile

EXACT_LOGITS = 5e-4
"""Largest difference of a logit between two placements, profile `exact`: 9 x 5.7e-5."""
GAPS: dict[Profile, float] = {"exact": 2 * EXACT_LOGITS, "default": 3.5}
"""Distance of the best logit from the next one below which greedy texts may differ. In `exact`
either of two logits may move by `EXACT_LOGITS`; `default`: 2 x 1.75."""
DEFAULT_KL = 1e-2
"""Mean KL of two placements over hundreds of tokens, profile `default`, nats: 2.4 x 4.1e-3."""
TOKEN_ERROR = 1e-5
"""Relative error of a token's routed experts in the middle of some tokens, CPU against card, where
both round inputs to bytes: 12 x 8e-7, what 99 of 100 tokens stay below (4,096 tokens, IQ2_XXS and
Q2_K, 256 and 1,024 columns; median 4e-7). In the others, 0.4 to 1.3 %, a hidden value lies in the
middle of two bytes and goes either way, which costs up to 6e-3. Inputs that are rounded on one side
alone cost 2.9e-3 to 3.6e-2, 1.1e-2 in the median."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which two greedy texts of one prompt differ."""

    place: int
    gap: float
    """Of the best logit from the next one, the larger of both texts'."""
    tokens: tuple[int, int]

    def __str__(self) -> str:
        return f"token {self.place}: {self.tokens[0]} or {self.tokens[1]}, gap {self.gap:.4g}"


@dataclass(frozen=True, slots=True)
class Greedy:
    """A greedy text."""

    tokens: tuple[int, ...]
    logits: Tensor
    """[T, V], what each token was chosen from."""


def first_difference(one: Greedy, other: Greedy) -> Difference | None:
    """Where two texts part; None where they are the same."""
    pairs = zip(one.tokens, other.tokens, strict=True)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return None
    gap = max(best_gap(text.logits[place]) for text in (one, other))
    return Difference(place, gap, (one.tokens[place], other.tokens[place]))


def best_gap(logits: Tensor) -> float:
    """Distance of the best logit from the next one."""
    best = logits.double().topk(2).values
    return float(best[0] - best[1])


def assert_parts_at_a_near_tie(name: str, one: Greedy, other: Greedy, profile: Profile) -> None:
    """Fail where two texts part although one of them was sure of its token."""
    found = first_difference(one, other)
    limit = GAPS[profile]
    if found is None or found.gap < limit:
        return
    rows = [text.logits[found.place].double().topk(3) for text in (one, other)]
    best = [list(zip(row.indices.tolist(), row.values.tolist(), strict=True)) for row in rows]
    raise AssertionError(f"{name}, {profile}: {found}, allowed {limit}; best logits {best}")


def largest_difference(one: Sequence[Tensor] | Tensor, other: Sequence[Tensor] | Tensor) -> str:
    """For messages: the largest difference of logits [T, V], and where."""
    distance = (torch.as_tensor(one).double() - torch.as_tensor(other).double()).abs()
    row, token = divmod(int(distance.argmax()), distance.shape[1])
    return f"{float(distance.max()):.4g} at row {row}, token {token}"
