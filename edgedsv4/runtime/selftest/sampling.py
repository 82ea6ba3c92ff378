"""Check of the choice of a token: what C and numpy choose, and the weights they choose among."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from edgedsv4.config import SamplingOptions
from edgedsv4.kernels.sample import SamplingRules, SeenTokens, sample, weights
from edgedsv4.runtime.selftest.check import Check, draw

if TYPE_CHECKING:
    from edgedsv4.kernels.dispatch import Implementation

_TOKENS, _DRAWS, _TEMPERATURE = 1031, 9, 0.75
_PLAIN = (SamplingOptions(temperature=0), SamplingOptions(temperature=_TEMPERATURE))
_FILTERED = (
    SamplingOptions(temperature=0.5, top_k=40, top_p=0.9, min_p=0.01),
    SamplingOptions(
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={3: 2.0, 77: -np.inf},
        top_p=0.7,
    ),
)


def sampling_checks() -> Iterator[Check]:
    """Tokens by plain options against their definition; what filters leave against numpy's."""
    yield Check("sample", _sampled, _defined, limit=0)


def _sampled(backend: Implementation) -> list[Tensor]:
    tokens = [_tokens(options, backend) for options in _PLAIN]
    return [*tokens, *_filtered(backend)]


def _filtered(backend: Implementation) -> list[Tensor]:
    """Tokens, and the bits of all weights."""
    results = []
    for options in _FILTERED:
        rules = SamplingRules(options, _TOKENS)
        found = [weights(row.numpy(), rules, _seen(), backend=backend) for row in _logits()]
        results += [_tokens(options, backend), torch.from_numpy(np.stack(found).view(np.int64))]
    return results


def _tokens(options: SamplingOptions, backend: Implementation) -> Tensor:
    rules, seen = SamplingRules(options, _TOKENS), _seen()
    rows = enumerate(_logits())
    return torch.tensor(
        [sample(row.numpy(), rules, seen, _uniform(i), backend=backend) for i, row in rows]
    )


def _defined() -> list[Tensor]:
    """The first of the largest; where a number falls among summed-up probabilities."""
    greedy, drawn = [], []
    for index, row in enumerate(_logits()):
        greedy.append(int((row == row.max()).nonzero()[0, 0]))
        sums = torch.softmax(row.double() / _TEMPERATURE, dim=0).cumsum(dim=0)
        drawn.append(int(torch.searchsorted(sums, _uniform(index) * sums[-1], right=True)))
    return [torch.tensor(greedy), torch.tensor(drawn), *_filtered("reference")]


def _logits() -> list[Tensor]:
    """The last row has ties everywhere."""
    return [*draw(90, _DRAWS, _TOKENS).unbind(), draw(91, _TOKENS).round()]


def _uniform(index: int) -> float:
    return (index + 0.37) / (_DRAWS + 1)


def _seen() -> SeenTokens:
    """Every third token was in the prompt, every sixth in the reply too."""
    seen = SeenTokens.none(_TOKENS)
    seen.flags[::3] = True
    seen.generated[::6] = np.arange(0, _TOKENS, 6) % 4
    return seen
