"""Choosing a token id from one row of logits; the numpy code here is the definition.

The steps, in this order, all in float64: logit bias; repetition, presence and frequency penalties;
temperature; top-k; top-p over what top-k left; min-p. What is left has weights e^((score - largest)
/ temperature). Wherever tokens are ranked the larger score comes first and equal scores go by the
lower id, so exactly k tokens survive top-k and a greedy tie has one answer. A number u in [0, 1)
chooses the first token, in id order, at which the running sum of the weights exceeds u times their
total.

Exponentials and sums are spelt out down to the order of their operations, so that the C code, which
sorts no row, gives the same token for the same u, and the same weights bit for bit.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import ConfigError, NumericError
from edgedsv4.kernels.dispatch import resolve_backend
from edgedsv4.kernels.native.library import HAVE_NATIVE, library

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from edgedsv4.config import Backend, SamplingOptions
    from edgedsv4.kernels.dispatch import Implementation

FloatArray = npt.NDArray[np.float64]
Logits = npt.NDArray[np.floating[Any]]

SEGMENT = 64
"""Tokens summed one after the other; then the sums of the segments are."""

_LARGEST_SCORE = 1e300
_LOWEST_EXPONENT = -700.0


@dataclass(slots=True)
class SeenTokens:
    """What the penalties look at."""

    flags: npt.NDArray[np.bool_]
    """[V], True for tokens of the prompt and the reply."""
    generated: npt.NDArray[np.int32]
    """[V], how often the reply has each; 0 where the flag is not set."""

    @classmethod
    def none(cls, vocab_size: int) -> SeenTokens:
        """Before the first token."""
        return cls(np.zeros(vocab_size, np.bool_), np.zeros(vocab_size, np.int32))

    def copy(self) -> SeenTokens:
        """Counts of its own."""
        return SeenTokens(self.flags.copy(), self.generated.copy())


class SamplingRules:
    """Options as both implementations read them, for a vocabulary of V tokens.

    Args:
        options: temperature, filters, penalties and bias.
        vocab_size: V.

    Raises:
        ConfigError: if `logit_bias` names a token that the vocabulary does not have.
    """

    def __init__(self, options: SamplingOptions, vocab_size: int) -> None:
        beyond = [i for i in options.logit_bias if i >= vocab_size]
        if beyond:
            raise ConfigError(
                f"logit_bias must name token ids below {vocab_size}, found {beyond[0]}"
            )
        self.vocab_size = vocab_size
        # Floats of Python, since one of numpy may compute in float32.
        self.bias_ids = np.array(sorted(options.logit_bias), dtype=np.int64)
        self.bias = np.array([options.logit_bias[int(i)] for i in self.bias_ids], np.float64)
        self.repetition = float(options.repetition_penalty)
        self.presence = float(options.presence_penalty)
        self.frequency = float(options.frequency_penalty)
        temperature = float(options.temperature)
        self.scale = min(1.0 / temperature, _LARGEST_SCORE) if temperature else 0.0
        """1 / temperature; 0 when the largest score wins."""
        self.top_k, self.top_p = int(options.top_k), float(options.top_p)
        self.min_p = float(options.min_p)
        is_penalised = self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0
        self.has_changes = is_penalised or self.bias.size > 0
        """Whether scores can differ from the logits."""
        self.scratch_bytes = 0
        """Working memory of the C code."""
        self._record: Any = None

    def native(self) -> Any:
        """These rules as `dk_sampling *`, with room for the tokens seen."""
        lib, ffi = library()
        if self._record is None:
            self.scratch_bytes = lib.dk_sample_scratch_bytes(self.vocab_size)
            self._record = record = ffi.new("dk_sampling *")
            record.bias_count = self.bias.size
            if self.bias.size:
                record.bias_ids = ffi.from_buffer("int64_t[]", self.bias_ids)
                record.bias = ffi.from_buffer("double[]", self.bias)
            for name in ("repetition", "presence", "frequency", "scale", "top_k", "top_p", "min_p"):
                setattr(record, name, getattr(self, name))
        return self._record


def sample(
    logits: Logits, rules: SamplingRules, seen: SeenTokens, u: float, *, backend: Backend = "auto"
) -> int:
    """Choose a token id.

    Args:
        logits: [V], any float dtype; -inf bans a token.
        rules: options.
        seen: tokens that the penalties count; read only.
        u: the random number, in [0, 1); of no account at temperature 0.
        backend: C takes float32 only.

    Raises:
        NumericError: for NaN or +inf, or when every logit is -inf.
        ConfigError: when the logit bias bans every token, or the length is not V.
    """
    if _choose(logits, rules, backend) == "native":
        token_id = _sample_native(logits, rules, seen, u, None)
        if token_id >= 0:
            return token_id
    return sample_reference(logits, rules, seen, u)  # which also says what is wrong


def weights(
    logits: Logits, rules: SamplingRules, seen: SeenTokens, *, backend: Backend = "auto"
) -> FloatArray:
    """What `sample` chooses among: [V] float64, the largest 1, zero where a token cannot come.

    Raises:
        As `sample`.
    """
    if not rules.scale:
        result = np.zeros(rules.vocab_size)
        result[sample(logits, rules, seen, 0.0, backend=backend)] = 1.0
        return result
    if _choose(logits, rules, backend) == "native":
        result = np.empty(rules.vocab_size)
        if _sample_native(logits, rules, seen, 0.0, result) >= 0:
            return result
    return weights_reference(logits, rules, seen)


def _choose(logits: Logits, rules: SamplingRules, backend: Backend) -> Implementation:
    fits = logits.dtype == np.float32 and logits.shape == (rules.vocab_size,)
    available: Sequence[Implementation] = ("reference",)
    if HAVE_NATIVE and fits:
        available = ("native", "reference")
    return resolve_backend(backend, available, operation="sample")


def sample_reference(logits: Logits, rules: SamplingRules, seen: SeenTokens, u: float) -> int:
    """`sample` in numpy."""
    if not rules.scale:
        return int(np.argmax(scores_reference(logits, rules, seen)))
    sums = running_sum(weights_reference(logits, rules, seen))
    # A rounded product can reach the total; the last token that has any weight then wins.
    last = int(np.searchsorted(sums, sums[-1], side="left"))
    return min(int(np.searchsorted(sums, u * sums[-1], side="right")), last)


def weights_reference(logits: Logits, rules: SamplingRules, seen: SeenTokens) -> FloatArray:
    """`weights` in numpy, at a temperature above 0."""
    scores = scores_reference(logits, rules, seen)
    if 0 < rules.top_k < scores.size:
        _keep_top_k(scores, rules.top_k)
    is_left = scores > -math.inf
    result = np.zeros_like(scores)
    with np.errstate(over="ignore"):
        result[is_left] = exponential((scores[is_left] - scores.max()) * rules.scale)
    if rules.top_p < 1.0:
        _keep_top_p(result, scores, rules.top_p)
    result[result < rules.min_p] = 0.0
    return result


def scores_reference(logits: Logits, rules: SamplingRules, seen: SeenTokens) -> FloatArray:
    """Logits after bias and penalties, [V] float64 with at least one finite entry.

    Raises:
        As `sample`.
    """
    scores = np.array(logits, dtype=np.float64)
    if scores.shape != (rules.vocab_size,):
        raise ConfigError(f"logits must be [{rules.vocab_size}], found {list(scores.shape)}")
    bad = np.flatnonzero(np.isnan(scores) | (scores == math.inf))
    if bad.size:
        raise NumericError(f"logit of token {bad[0]} is {scores[bad[0]]}; no token was chosen")
    if not np.isfinite(scores).any():
        raise NumericError("every logit is -inf; no token was chosen")
    scores[rules.bias_ids] += rules.bias
    if not np.isfinite(scores).any():
        raise ConfigError("logit_bias bans every token that the model allows")
    banned = np.isneginf(scores)
    with np.errstate(over="ignore"):
        _penalise(scores, rules, seen)
    # A huge bias times a penalty overflows; infinities would become NaN in the differences.
    np.clip(scores, -_LARGEST_SCORE, _LARGEST_SCORE, out=scores)
    scores[banned] = -math.inf
    return scores


def exponential(x: FloatArray) -> FloatArray:
    """e^x for x <= 0, and 0 below -700: x = n ln 2 + r, and the series of e^r up to r^13.

    Unlike a library's it has the same bits everywhere.
    """
    clamped = np.maximum(x, _LOWEST_EXPONENT)
    n = np.rint(clamped * 1.4426950408889634)
    # ln 2 in two parts, the first of so few bits that its product with n is exact.
    r = clamped - n * float.fromhex("0x1.62e42feep-1")
    r -= n * float.fromhex("0x1.a39ef35793c76p-33")
    square = r * r
    even, odd = (_polynomial(square, range(last, 1, -2)) for last in (12, 13))
    value = np.ldexp(((odd * r + even) * square + r) + 1.0, n.astype(np.int32))
    return np.where(x >= _LOWEST_EXPONENT, value, 0.0)


def _polynomial(x: FloatArray, powers: Iterable[int]) -> FloatArray:
    """Sum of x^i / power! over the powers of e^r, from the highest down."""
    total = np.zeros_like(x)
    for power in powers:
        total = total * x + 1.0 / math.factorial(power)
    return total


def running_sum(values: FloatArray) -> FloatArray:
    """Sums up to each of values [V]: one by one in segments of 64, added to those of all before."""
    padded = np.zeros(-(-values.size // SEGMENT) * SEGMENT)
    padded[: values.size] = values
    within = np.cumsum(padded.reshape(-1, SEGMENT), axis=1)
    before = np.cumsum(np.concatenate(([0.0], within[:-1, -1])))
    total: FloatArray = (before[:, None] + within).reshape(-1)[: values.size]
    return total


def _penalise(scores: FloatArray, rules: SamplingRules, seen: SeenTokens) -> None:
    values, factor = scores[seen.flags], rules.repetition
    scores[seen.flags] = np.where(values > 0, values / factor, values * factor)
    used = np.flatnonzero(seen.generated)
    scores[used] -= rules.presence
    scores[used] -= rules.frequency * seen.generated[used]


def _keep_top_k(scores: FloatArray, k: int) -> None:
    threshold = np.partition(scores, scores.size - k)[scores.size - k]
    ties = np.flatnonzero(scores == threshold)
    surplus = ties[k - int((scores > threshold).sum()) :]
    scores[scores < threshold] = -math.inf
    scores[surplus] = -math.inf


def _keep_top_p(result: FloatArray, scores: FloatArray, top_p: float) -> None:
    total = running_sum(result)[-1]
    # Tokens below the first floor hold less than half of 1 - top_p together, so as a rule none is
    # needed to reach top_p; leaving them out spares sorting a whole vocabulary.
    for floor in (total * (1.0 - top_p) / (2 * result.size), 0.0):
        candidates = np.flatnonzero((result > 0) & (result >= floor))
        order = candidates[np.argsort(-scores[candidates], kind="stable")]
        reached = np.cumsum(result[order]) >= top_p * total
        if reached.any():
            kept = order[: int(np.argmax(reached)) + 1]
            values = result[kept]
            result[:] = 0.0
            result[kept] = values
            return


class _Memory(threading.local):
    """The calling thread's working memory, as large as its largest vocabulary needed."""

    size = 0
    start: Any = None


_MEMORY = _Memory()


def _sample_native(
    logits: Logits, rules: SamplingRules, seen: SeenTokens, u: float, result: FloatArray | None
) -> int:
    lib, ffi = library()
    if not logits.flags.c_contiguous:
        logits = np.ascontiguousarray(logits)
    row = ffi.from_buffer("float[]", logits)
    if not (rules.has_changes or rules.scale):
        return int(lib.dk_argmax(row, rules.vocab_size))
    record = rules.native()
    record.seen = ffi.from_buffer("uint8_t[]", seen.flags)
    record.generated = ffi.from_buffer("int32_t[]", seen.generated)
    needed = rules.scratch_bytes
    if _MEMORY.size < needed:
        _MEMORY.size, _MEMORY.start = needed, ffi.new("uint8_t[]", needed)
    out = ffi.NULL if result is None else ffi.from_buffer("double[]", result)
    return int(lib.dk_sample(out, row, rules.vocab_size, record, u, _MEMORY.start))
