"""Choosing the next token from logits: a pure function of the logits, the options and the history.

Everything runs in float64 numpy, so the choice does not depend on the device that made the logits;
where the largest logit wins as it stands, C code finds it, with the same answer.
The steps, in this order: logit bias; repetition, presence and frequency penalties; temperature;
top-k; top-p over what top-k left; min-p. Wherever tokens are ranked the larger logit comes first
and equal logits go by the lower id, so exactly k tokens survive top-k and a greedy tie has one
answer.

Random numbers are counter based: the n-th token of a sampler uses the n-th block of Philox4x64-10
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; numpy's `Philox`) under the
key `seed`. The top 53 bits of the block's first word, divided by 2^53, are the uniform number that
the cumulative distribution, in token id order, is searched with. A seed therefore names one text
per prompt, and no draw depends on how many numbers an earlier one used.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from copy import copy
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import ConfigError, NumericError
from edgedsv4.kernels.native.library import HAVE_NATIVE, library

if TYPE_CHECKING:
    from edgedsv4.config import SamplingOptions

FloatArray = npt.NDArray[np.float64]

_LARGEST_SCORE = 1e300


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) that token `index` of a reply with this seed uses."""
    philox = np.random.Philox(key=seed, counter=index)
    return (int(philox.random_raw()) >> 11) / float(1 << 53)


class Sampler:
    """Draws the tokens of one reply.

    `sample` only reads the state; `accept` records the token that was really used, `observe` tokens
    that were not generated (the prompt). Not thread safe: one reply, one sampler.

    Args:
        options: sampling options; a `seed` of None draws one, readable as `seed`.
        vocab_size: V, length of the logits.

    Raises:
        ConfigError: if `logit_bias` names a token that the vocabulary does not have.
    """

    def __init__(self, options: SamplingOptions, vocab_size: int) -> None:
        self.options = options
        self.vocab_size = vocab_size
        self.seed = secrets.randbits(63) if options.seed is None else options.seed
        self.num_generated = 0
        self._seen = np.zeros(vocab_size, dtype=np.bool_)
        self._generated = np.zeros(vocab_size, dtype=np.int64)
        beyond = [i for i in options.logit_bias if i >= vocab_size]
        if beyond:
            raise ConfigError(
                f"logit_bias must name token ids below {vocab_size}, found {beyond[0]}"
            )
        self._takes_the_largest = _is_plain_greedy(options)
        self._bias_ids = np.array(sorted(options.logit_bias), dtype=np.int64)
        self._bias = np.array([options.logit_bias[int(i)] for i in self._bias_ids])

    def observe(self, token_ids: Iterable[int]) -> None:
        """Count tokens of the prompt as seen; only the repetition penalty looks at them."""
        ids = np.fromiter(token_ids, dtype=np.int64)
        if ids.size:
            self._check_ids(int(ids.min()), int(ids.max()))
            self._seen[ids] = True

    def accept(self, token_id: int) -> None:
        """Record a generated token: penalties count it and the next draw uses the next number."""
        self._check_ids(token_id, token_id)
        self._seen[token_id] = True
        self._generated[token_id] += 1
        self.num_generated += 1

    def after(self, token_ids: Iterable[int]) -> Sampler:
        """A sampler of its own that has accepted these tokens as well; this one stays as it is."""
        other = copy(self)
        other._seen, other._generated = self._seen.copy(), self._generated.copy()
        for token_id in token_ids:
            other.accept(token_id)
        return other

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """The next token id; calling it again without `accept` gives the same one.

        Args:
            logits: [V], any float dtype; -inf bans a token.

        Raises:
            NumericError: for NaN or +inf, or when every logit is -inf.
            ConfigError: when the logit bias bans every token, or the length is not V.
        """
        if self._takes_the_largest:
            token_id = _largest(logits, self.vocab_size)
            if token_id >= 0:
                return token_id
        scores = self._adjusted(logits)
        if self.options.temperature == 0:
            return int(np.argmax(scores))
        cumulative = np.cumsum(self._filtered(scores))
        target = uniform(self.seed, self.num_generated) * cumulative[-1]
        # A rounded product can reach the total; the last token that has any probability then wins.
        last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
        return min(int(np.searchsorted(cumulative, target, side="right")), last)

    def probabilities(self, logits: npt.NDArray[np.float32]) -> FloatArray:
        """The distribution `sample` draws from: [V] float64, sum 1, zero where a token cannot come.

        Raises:
            As `sample`.
        """
        scores = self._adjusted(logits)
        if self.options.temperature == 0:
            one_hot = np.zeros(self.vocab_size)
            one_hot[np.argmax(scores)] = 1.0
            return one_hot
        weights = self._filtered(scores)
        weights /= weights.sum()
        return weights

    def _check_ids(self, low: int, high: int) -> None:
        if low < 0 or high >= self.vocab_size:
            found = low if low < 0 else high
            raise ConfigError(f"token ids must be 0..{self.vocab_size - 1}, found {found}")

    def _adjusted(self, logits: npt.NDArray[np.float32]) -> FloatArray:
        """Logits after bias and penalties, [V] float64 with at least one finite entry."""
        scores = np.array(logits, dtype=np.float64)
        if scores.shape != (self.vocab_size,):
            raise ConfigError(f"logits must be [{self.vocab_size}], found {list(scores.shape)}")
        bad = np.flatnonzero(np.isnan(scores) | (scores == math.inf))
        if bad.size:
            raise NumericError(f"logit of token {bad[0]} is {scores[bad[0]]}; no token was chosen")
        if not np.isfinite(scores).any():
            raise NumericError("every logit is -inf; no token was chosen")
        scores[self._bias_ids] += self._bias
        if not np.isfinite(scores).any():
            raise ConfigError("logit_bias bans every token that the model allows")
        banned = np.isneginf(scores)
        with np.errstate(over="ignore"):
            self._penalise(scores)
        # A huge bias times a penalty overflows; infinities would become NaN in the differences.
        np.clip(scores, -_LARGEST_SCORE, _LARGEST_SCORE, out=scores)
        scores[banned] = -math.inf
        return scores

    def _penalise(self, scores: FloatArray) -> None:
        options = self.options
        if options.repetition_penalty != 1.0:
            seen = scores[self._seen]
            factor = options.repetition_penalty
            scores[self._seen] = np.where(seen > 0, seen / factor, seen * factor)
        if options.presence_penalty or options.frequency_penalty:
            used = np.flatnonzero(self._generated)
            scores[used] -= options.presence_penalty
            scores[used] -= options.frequency_penalty * self._generated[used]

    def _filtered(self, scores: FloatArray) -> FloatArray:
        """Unnormalised probabilities after temperature and the three filters; the largest is 1."""
        options = self.options
        with np.errstate(over="ignore"):
            weights: FloatArray = np.exp((scores - scores.max()) / options.temperature)
        if 0 < options.top_k < weights.size:
            weights = _keep_top_k(scores, weights, options.top_k)
        if options.top_p < 1.0:
            weights = _keep_top_p(scores, weights, options.top_p)
        if options.min_p > 0.0:
            weights[weights < options.min_p] = 0.0
        return weights


def _is_plain_greedy(options: SamplingOptions) -> bool:
    """Whether the logits as they are decide, without bias, penalty or chance."""
    changes = options.logit_bias or options.presence_penalty or options.frequency_penalty
    return options.temperature == 0 and options.repetition_penalty == 1.0 and not changes


def _largest(logits: npt.NDArray[np.float32], vocab_size: int) -> int:
    """The first of the largest logits; -1 where it takes a closer look to choose or to complain."""
    is_plain = logits.dtype == np.float32 and logits.shape == (vocab_size,)
    if not HAVE_NATIVE or not is_plain or not logits.flags.c_contiguous:
        return -1
    lib, ffi = library()
    return int(lib.dk_argmax(ffi.from_buffer("float[]", logits), vocab_size))


def _keep_top_k(scores: FloatArray, weights: FloatArray, k: int) -> FloatArray:
    threshold = np.partition(scores, scores.size - k)[scores.size - k]
    above = scores > threshold
    ties = np.flatnonzero(scores == threshold)
    kept = np.zeros_like(weights)
    kept[above] = weights[above]
    chosen = ties[: k - int(above.sum())]
    kept[chosen] = weights[chosen]
    return kept


def _keep_top_p(scores: FloatArray, weights: FloatArray, top_p: float) -> FloatArray:
    total = weights.sum()
    # Tokens below this hold less than half of 1 - top_p together, so none of them is needed to
    # reach top_p; leaving them out first spares sorting a whole vocabulary.
    floor = total * (1.0 - top_p) / (2 * weights.size)
    candidates = np.flatnonzero((weights > 0) & (weights >= floor))
    order = candidates[np.argsort(-scores[candidates], kind="stable")]
    reached = np.cumsum(weights[order]) >= top_p * total
    count = int(np.argmax(reached)) + 1 if reached.any() else order.size
    kept = np.zeros_like(weights)
    kept[order[:count]] = weights[order[:count]]
    return kept
