"""100,000 tokens sampled with drafts follow the main model's distribution, not the block's.

The model is a Markov chain, so each token's distribution is known from the one before it; the draft
block is another chain. The loop is the real one; the sampler looks its numbers up, which is shown
to be the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tiny_model import tiny_config
from torch import Tensor

from edgedsv4.config import EngineOptions, SamplingOptions
from edgedsv4.model.kv_cache import Numerics
from edgedsv4.runtime.sampler import Sampler
from edgedsv4.runtime.timeline import Timeline

VOCAB = 6
DRAWS = 100_000
LIMIT_30 = 59.70
"""Chi-square of 30 degrees of freedom: above this in one of 1,000 cases."""


@dataclass
class ChainCache:
    length: int = 0
    capacity: int = DRAWS + 100
    rewind_floor: int = 0

    def rewind(self, length: int) -> None:
        self.length = length

    def nbytes(self) -> int:
        return 0


@dataclass(frozen=True)
class ChainForward:
    logits: Tensor | None
    streams: Tensor
    best: int | None = None


class ChainModel:
    """Row `i` of a table is the logits behind token `i`."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.config = tiny_config(vocab_size=VOCAB, hidden_size=1, window=1)
        self.numerics = Numerics(profile="exact", dtype=torch.float32, device=torch.device("cpu"))
        self.table = torch.from_numpy(rng.normal(size=(VOCAB, VOCAB)).astype(np.float32))
        shift = torch.from_numpy(rng.normal(size=(VOCAB, VOCAB)).astype(np.float32))
        self.draft_table = self.table + 0.7 * shift

    def new_cache(self, _capacity: int) -> ChainCache:
        return ChainCache()

    new_draft_cache = new_cache

    def forward(self, ids: Tensor, cache: ChainCache, **_: object) -> ChainForward:
        cache.length += len(ids)
        return ChainForward(self.table[ids], torch.zeros(len(ids), 4, 1))

    def forward_draft(
        self, streams: Tensor, ids: Tensor, cache: ChainCache, **_: object
    ) -> ChainForward:
        cache.length += len(ids)
        return ChainForward(self.draft_table[ids], streams)


class TableSampler(Sampler):
    """Draws what `Sampler` draws, with its distributions and random numbers made once."""

    def __init__(self, options: SamplingOptions, vocab_size: int) -> None:
        super().__init__(options, vocab_size)
        blocks = np.random.Philox(key=self.seed).random_raw(4 * (DRAWS + 10))[::4]
        self.uniforms = (blocks >> np.uint64(11)) / float(1 << 53)
        self.cumulative: dict[bytes, npt.NDArray[np.float64]] = {}

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        key = logits.tobytes()
        if key not in self.cumulative:
            self.cumulative[key] = np.cumsum(self.probabilities(logits))
        target = self.uniforms[self.num_generated]
        return int(self.cumulative[key].searchsorted(target, side="right"))


def sampled(
    model: ChainModel, draft: int, options: SamplingOptions, kind: type[Sampler] = Sampler
) -> tuple[list[int], Timeline]:
    timeline = Timeline(
        model,  # type: ignore[arg-type]
        capacity=DRAWS + 100,
        options=EngineOptions(draft=draft),
        check_files=lambda: None,
        should_stop=lambda: False,
        clock=lambda: 0.0,
    )
    timeline.evaluate([0])
    return list(timeline.decode(kind(options, VOCAB), (), lambda: None)), timeline


def chi_square(
    token_ids: list[int], first: int, probabilities: npt.NDArray[np.float64]
) -> tuple[float, int]:
    """Statistic of all transitions, and its degrees of freedom."""
    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, ([first, *token_ids[:-1]], token_ids), 1)
    expected = counts.sum(axis=1, keepdims=True) * probabilities
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts[possible] - expected[possible]) ** 2 / expected[possible]).sum()
    return float(statistic), int(possible.sum()) - VOCAB


def test_many_draws_follow_the_main_model() -> None:
    model = ChainModel(seed=5)
    options = SamplingOptions(seed=11, temperature=0.9, max_tokens=DRAWS)
    token_ids, timeline = sampled(model, 3, options, TableSampler)
    sampler = Sampler(options, VOCAB)
    rows = np.stack([sampler.probabilities(row.numpy()) for row in model.table])
    statistic, freedom = chi_square(token_ids, 0, rows)
    assert (len(token_ids), freedom) == (DRAWS, 30)
    assert statistic < LIMIT_30
    # The test would notice if the drafts' distribution came through.
    drafts = np.stack([sampler.probabilities(row.numpy()) for row in model.draft_table])
    assert chi_square(token_ids, 0, drafts)[0] > 100 * LIMIT_30
    assert timeline.drafts is not None
    assert timeline.drafts.drafted_steps > DRAWS / 5
    assert 0.2 < timeline.drafts.acceptance[2] < timeline.drafts.acceptance[0] < 0.95


@pytest.mark.parametrize("kind", [Sampler, TableSampler])
def test_draws_are_those_of_plain_decoding(kind: type[Sampler]) -> None:
    model = ChainModel(seed=5)
    options = SamplingOptions(seed=11, temperature=0.9, max_tokens=3000)
    assert sampled(model, 3, options, kind)[0] == sampled(model, 0, options)[0]
