"""Functions of the header about samplers: options, and the sampler as a thing of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from edgedsv4 import ConfigError, Sampler, SamplingOptions
from edgedsv4.capi.bridge import exported, ffi
from edgedsv4.capi.exclusive import Exclusive
from edgedsv4.capi.handles import HandleTable
from edgedsv4.capi.values import (
    bytes_of,
    checked_size,
    put_bytes,
    read_struct,
    required,
    tokens_of,
    write_struct,
)

_OPTIONS = "dsv4_sampling_options"
_MOST_VOCABULARY = 1 << 24
_MOST_BIASES = 1 << 24


def _default_options() -> Any:
    """The defaults of `SamplingOptions` as a struct."""
    struct = ffi.new(f"{_OPTIONS} *")
    struct.struct_size = ffi.sizeof(_OPTIONS)
    struct.seed = -1
    for field in dataclasses.fields(SamplingOptions):
        value = getattr(SamplingOptions(), field.name)
        if isinstance(value, (int, float)):
            setattr(struct, field.name, value)
    return struct


_DEFAULTS = _default_options()


def sampling_options_of(pointer: Any) -> SamplingOptions:
    """Sampling options of a struct, or the defaults for NULL."""
    if not pointer:
        return SamplingOptions()
    struct = read_struct(pointer, _OPTIONS, _DEFAULTS)
    values: dict[str, Any] = {
        field.name: getattr(struct, field.name)
        for field in dataclasses.fields(SamplingOptions)
        if field.name != "logit_bias"
    }
    values["seed"] = None if struct.seed == -1 else struct.seed
    values["max_tokens"] = struct.max_tokens or None
    return SamplingOptions(logit_bias=_biases(struct.bias, struct.bias_count), **values)


def _biases(pointer: Any, count: int) -> dict[int, float]:
    if count > _MOST_BIASES:
        what = f"bias_count must be 0..{_MOST_BIASES}, found {count}"
        raise ConfigError(what, name="bias_count")
    if count:
        required(pointer, "bias")
    return {pointer[i].token: pointer[i].bias for i in range(count)}


class _OwnSampler:
    """A sampler that C made."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.user = Exclusive("the sampler")


SAMPLERS: HandleTable[_OwnSampler] = HandleTable(4, "sampler")


def sampler_of(handle: Any) -> _OwnSampler:
    """The sampler of a handle."""
    return SAMPLERS.get(int(ffi.cast("uintptr_t", handle)))


def _add(sampler: Sampler, out: Any) -> int:
    out[0] = ffi.cast("dsv4_sampler *", SAMPLERS.add(_OwnSampler(sampler)))
    return 0


@exported
def dsv4_sampling_options_init(options: Any, struct_size: int) -> int:
    """The defaults of `SamplingOptions`."""
    required(options, "options").struct_size = checked_size(struct_size, _OPTIONS)
    write_struct(options, _OPTIONS, ffi.new(f"{_OPTIONS} *", _DEFAULTS[0]))
    return 0


@exported
def dsv4_sampler_new(options: Any, vocab_size: int, out: Any) -> int:
    """`Sampler`."""
    required(out, "out")[0] = ffi.NULL
    if not 1 <= vocab_size <= _MOST_VOCABULARY:
        what = f"vocab_size must be 1..{_MOST_VOCABULARY}, found {vocab_size}"
        raise ConfigError(what, name="vocab_size")
    return _add(Sampler(sampling_options_of(options), vocab_size), out)


@exported
def dsv4_sampler_sample(sampler: Any, logits: Any, count: int, token: Any) -> int:
    """`Sampler.sample`."""
    own = sampler_of(sampler)
    required(token, "token")
    if count != own.sampler.vocab_size:
        raise ConfigError(
            f"count must be the vocabulary of the sampler, {own.sampler.vocab_size}, found {count}",
            name="count",
        )
    with own.user.taken():
        view = ffi.buffer(required(logits, "logits"), 4 * count)
        token[0] = own.sampler.sample(np.frombuffer(view, dtype=np.float32))
    return 0


@exported
def dsv4_sampler_accept(sampler: Any, tokens: Any, count: int) -> int:
    """`Sampler.accept` for each token; an id that is none leaves the sampler as it was."""
    own = sampler_of(sampler)
    with own.user.taken():
        own.sampler = own.sampler.after(tokens_of(tokens, count))
    return 0


@exported
def dsv4_sampler_observe(sampler: Any, tokens: Any, count: int) -> int:
    """`Sampler.observe`."""
    own = sampler_of(sampler)
    with own.user.taken():
        own.sampler.observe(tokens_of(tokens, count))
    return 0


@exported
def dsv4_sampler_save(sampler: Any, buffer: Any, capacity: int, size: Any) -> int:
    """`Sampler.state` as bytes."""
    own = sampler_of(sampler)
    with own.user.taken():
        return put_bytes(own.sampler.to_bytes(), buffer, capacity, size)


@exported
def dsv4_sampler_restore(state: Any, size: int, out: Any) -> int:
    """`Sampler.from_state`."""
    required(out, "out")[0] = ffi.NULL
    return _add(Sampler.from_bytes(bytes_of(state, size, "state")), out)


@exported
def dsv4_sampler_free(sampler: Any) -> int:
    """Forget a sampler."""
    if sampler:
        with sampler_of(sampler).user.taken():
            SAMPLERS.remove(int(ffi.cast("uintptr_t", sampler)))
    return 0
