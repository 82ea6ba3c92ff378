"""Check of the sampler, whose search for the largest logit is C code where that is built."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgedsv4.config import SamplingOptions
from edgedsv4.runtime.sampler import Sampler
from edgedsv4.runtime.selftest.check import Check, draw

_TOKENS, _DRAWS, _SEED, _TEMPERATURE = 1031, 9, 5, 0.75


def sampling_checks() -> Iterator[Check]:
    """Greedy choices and seeded draws."""
    yield Check("sample", lambda _backend: _sampled(), _defined, limit=0, backends=("native",))


def _logits() -> list[npt.NDArray[np.float32]]:
    tied = draw(91, _TOKENS).round()
    rows = (*draw(90, _DRAWS, _TOKENS).unbind(), tied)
    return [np.ascontiguousarray(row.numpy()) for row in rows]


def _sampled() -> list[Tensor]:
    greedy = Sampler(SamplingOptions(temperature=0), _TOKENS)
    drawing = Sampler(SamplingOptions(temperature=_TEMPERATURE, seed=_SEED), _TOKENS)
    drawn = []
    for logits in _logits():
        drawn.append(drawing.sample(logits))
        drawing.accept(drawn[-1])
    return [torch.tensor([greedy.sample(logits) for logits in _logits()]), torch.tensor(drawn)]


def _defined() -> list[Tensor]:
    """The first of the largest; where a random number falls among summed-up probabilities."""
    greedy, drawn = [], []
    for index, logits in enumerate(_logits()):
        greedy.append(int(np.flatnonzero(logits == logits.max())[0]))
        scores = logits.astype(np.float64) / _TEMPERATURE
        sums = np.cumsum(np.exp(scores - scores.max()))
        word = int(np.random.Philox(key=_SEED, counter=index).random_raw())
        target = (word >> 11) / float(1 << 53) * sums[-1]
        drawn.append(int(np.searchsorted(sums, target, side="right")))
    return [torch.tensor(greedy), torch.tensor(drawn)]
