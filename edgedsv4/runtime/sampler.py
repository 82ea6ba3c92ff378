"""The sampler of one reply: what was seen, which random number comes next, and a state to keep.

How a token is chosen from logits is `kernels/sample.py`; this is the history that goes with it.

Random numbers are counter based: the n-th token of a sampler uses the n-th block of Philox4x64-10
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; numpy's `Philox`) under the
key `seed`. The top 53 bits of the block's first word, divided by 2^53, are the uniform number. A
seed therefore names one text per prompt, no draw depends on how many numbers an earlier one used,
and a sampler's whole state is its options, its seed and its counts.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from edgedsv4.config import MAX_CONTEXT, SamplingOptions
from edgedsv4.errors import ConfigError, SnapshotError
from edgedsv4.kernels.sample import FloatArray, SamplingRules, SeenTokens, sample, weights
from edgedsv4.runtime.device_logits import DeviceLogits
from edgedsv4.runtime.sampler_bytes import decode_sampler, encode_sampler

if TYPE_CHECKING:
    from edgedsv4.config import Backend

STATE_VERSION = 1
"""Of what `Sampler.state` returns."""
MAX_VOCAB = 1 << 24
"""Tokens of a vocabulary must be fewer than this in a state, which may come from a damaged file."""

_WHOLE_OPTIONS = ("top_k", "seed", "max_tokens")


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) that token `index` of a reply with this seed uses."""
    philox = np.random.Philox(key=seed, counter=index)
    return (int(philox.random_raw()) >> 11) / float(1 << 53)


class Sampler:
    """Draws the tokens of one reply, from logits wherever they come from.

    `sample` only reads the state; `accept` records the token that was really used, `observe` tokens
    that were not generated (the prompt). Not thread safe: one reply, one sampler.

    Args:
        options: sampling options; a `seed` of None draws one, readable as `seed`.
        vocab_size: V, length of the logits.
        backend: "reference" chooses in numpy, "native" in C, "auto" in C where it can; the token is
            the same.

    Raises:
        ConfigError: if `logit_bias` names a token that the vocabulary does not have.
    """

    def __init__(
        self, options: SamplingOptions, vocab_size: int, *, backend: Backend = "auto"
    ) -> None:
        self.options = options
        self.vocab_size = vocab_size
        self.seed = secrets.randbits(63) if options.seed is None else options.seed
        self.num_generated = 0
        self._backend = backend
        self._rules = SamplingRules(options, vocab_size)
        self._seen = SeenTokens.none(vocab_size)

    def observe(self, token_ids: Iterable[int]) -> None:
        """Count tokens of the prompt as seen; only the repetition penalty looks at them."""
        ids = np.fromiter(token_ids, dtype=np.int64)
        if ids.size:
            self._check_ids(int(ids.min()), int(ids.max()))
            self._seen.flags[ids] = True

    def accept(self, token_id: int) -> None:
        """Record a generated token: penalties count it and the next draw uses the next number."""
        self._check_ids(token_id, token_id)
        self._seen.flags[token_id] = True
        self._seen.generated[token_id] += 1
        self.num_generated += 1

    def after(self, token_ids: Iterable[int]) -> Sampler:
        """A sampler of its own that has accepted these tokens as well; this one stays as it is."""
        other = copy(self)
        other._seen = self._seen.copy()
        for token_id in token_ids:
            other.accept(token_id)
        return other

    def sample(self, logits: npt.NDArray[np.float32] | DeviceLogits) -> int:
        """The next token id; calling it again without `accept` gives the same one.

        Args:
            logits: [V], any float dtype; -inf bans a token. Logits on a GPU give the same token.

        Raises:
            NumericError: for NaN or +inf, or when every logit is -inf.
            ConfigError: when the logit bias bans every token, or the length is not V.
        """
        is_random = self.options.temperature > 0
        u = uniform(self.seed, self.num_generated) if is_random else 0.0
        if isinstance(logits, DeviceLogits):
            drawn = logits.draw(self._rules, u)
            if drawn is not None:
                return drawn
            logits = logits.numpy()
        return sample(logits, self._rules, self._seen, u, backend=self._backend)

    def probabilities(self, logits: npt.NDArray[np.float32]) -> FloatArray:
        """The distribution `sample` draws from: [V] float64, sum 1, zero where a token cannot come.

        Raises:
            As `sample`.
        """
        result = weights(logits, self._rules, self._seen, backend=self._backend)
        result /= result.sum()
        return result

    def state(self) -> dict[str, Any]:
        """All there is to this sampler, as JSON types; `from_state` makes an equal one of it."""
        used = np.flatnonzero(self._seen.generated)
        return {
            "version": STATE_VERSION,
            "options": _plain_options(self.options),
            "vocab_size": self.vocab_size,
            "seed": int(self.seed),
            "seen": np.flatnonzero(self._seen.flags).tolist(),
            "generated": used.tolist(),
            "counts": self._seen.generated[used].tolist(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, backend: Backend = "auto") -> Self:
        """The sampler whose `state` this is: it goes on with the same tokens.

        Args:
            state: from `state`, perhaps by way of JSON.
            backend: as for a new sampler.

        Raises:
            ConfigError: for anything that `state` does not return, with the part at fault.
        """
        version, vocab_size, seed = (
            _whole(state, name, limit)
            for name, limit in (("version", None), ("vocab_size", MAX_VOCAB), ("seed", 1 << 63))
        )
        if version != STATE_VERSION:
            raise ConfigError(f"sampler state: version must be {STATE_VERSION}, found {version}")
        sampler = cls(_options_of(state), vocab_size, backend=backend)
        sampler.seed = seed
        seen, generated = (_wholes(state, name, vocab_size) for name in ("seen", "generated"))
        counts = _wholes(state, "counts", MAX_CONTEXT + 1)
        if len(counts) != len(generated) or len(set(generated)) != len(generated) or 0 in counts:
            raise ConfigError("sampler state: generated and counts must tell each token once")
        sampler._seen.flags[seen + generated] = True
        sampler._seen.generated[generated] = counts
        sampler.num_generated = sum(counts)
        return sampler

    def to_bytes(self) -> bytes:
        """`state` as bytes with a checksum."""
        return encode_sampler(self.state())

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, *, backend: Backend = "auto") -> Self:
        """The sampler whose `to_bytes` this is.

        Raises:
            SnapshotError: for anything else; `fault` says whether it ends early or was changed.
        """
        try:
            return cls.from_state(decode_sampler(data), backend=backend)
        except ConfigError as error:
            raise SnapshotError(str(error)) from None

    def _check_ids(self, low: int, high: int) -> None:
        if low < 0 or high >= self.vocab_size:
            found = low if low < 0 else high
            raise ConfigError(f"token ids must be 0..{self.vocab_size - 1}, found {found}")


def _plain_options(options: SamplingOptions) -> dict[str, Any]:
    """Options as JSON types; a ban, -inf, becomes None."""
    plain: dict[str, Any] = {}
    for field in fields(SamplingOptions):
        value = getattr(options, field.name)
        if field.name in _WHOLE_OPTIONS:
            plain[field.name] = None if value is None else int(value)
        elif field.name != "logit_bias":
            plain[field.name] = float(value)
    bias = options.logit_bias.items()
    plain["logit_bias"] = {str(i): None if b == -math.inf else float(b) for i, b in bias}
    return plain


def _options_of(state: Mapping[str, Any]) -> SamplingOptions:
    try:
        plain = dict(state["options"])
        bias = {int(i): -math.inf if b is None else b for i, b in plain.pop("logit_bias").items()}
        return SamplingOptions(**plain, logit_bias=bias)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"sampler state: options cannot be read: {error!r}") from None


def _whole(state: Mapping[str, Any], name: str, limit: int | None) -> int:
    """A whole number below the limit."""
    value = state.get(name)
    if type(value) is not int or value < 0 or (limit is not None and value >= limit):
        below = "" if limit is None else f" below {limit}"
        raise ConfigError(f"sampler state: {name} must be a whole number{below}, found {value!r}")
    return value


def _wholes(state: Mapping[str, Any], name: str, limit: int) -> list[int]:
    """A list of whole numbers below the limit."""
    values = state.get(name)
    if not isinstance(values, list) or any(
        type(value) is not int or not 0 <= value < limit for value in values
    ):
        raise ConfigError(f"sampler state: {name} must list whole numbers below {limit}")
    return values
