"""Stand-in until the real one arrives."""

from __future__ import annotations

import torch
from torch import Tensor


def argmax_work(tokens: int, vocab: int, device) -> Tensor:
    return torch.empty(1)


def argmax(ids, logits, work, bad):
    ids.copy_(logits.argmax(-1))
    bad.logical_or_(~torch.isfinite(logits).all())
