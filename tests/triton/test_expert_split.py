"""Which experts of a token the card computes."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu.expert_split import split_experts


@pytest.mark.parametrize("here", [[], [3], [0, 5], [0, 3, 5, 7, 9, 11]])
def test_those_in_the_bank_move_to_the_front(here: list[int]) -> None:
    ids = torch.tensor([0, 3, 5, 7, 9, 11], dtype=torch.int32)
    weights = torch.arange(1, 7).float()
    table = torch.full((12,), -1, dtype=torch.int32)
    table[here] = torch.tensor([40 + expert for expert in here], dtype=torch.int32)
    slots = torch.full((6,), -7, dtype=torch.int32, device=DEVICE)
    factors = torch.full((6,), torch.nan, device=DEVICE)
    used = torch.full((1,), -7, dtype=torch.int32, device=DEVICE)
    split_experts(slots, factors, used, *(t.to(DEVICE) for t in (ids, weights, table)))
    rest = 6 - len(here)
    assert int(used) == len(here)
    assert slots.tolist() == [40 + expert for expert in here] + [0] * rest
    expected = [float(weights[ids.tolist().index(expert)]) for expert in here]
    assert factors.tolist() == expected + [0.0] * rest


def test_refuses_lists_of_several_lengths() -> None:
    ids, short = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (3, 2))
    weights = torch.zeros(3, device=DEVICE)
    with pytest.raises(ShapeError, match="split_experts"):
        split_experts(short, weights, ids[:1], ids, weights, ids)
