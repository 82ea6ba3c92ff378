"""Options: what is out of range or of another type is refused with the option's name."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from edgedsv4.config import EngineOptions, SamplingOptions
from edgedsv4.errors import ConfigError

Options = type[EngineOptions] | type[SamplingOptions]
WRONG = ("4", 1.5, True, [], {}, math.nan, math.inf, -math.inf, -1, 10**400, b"1", 1j)
FIELDS = [
    (record, field.name)
    for record in (EngineOptions, SamplingOptions)
    for field in dataclasses.fields(record)
]
# Values of `WRONG` that are right for some option.
RIGHT: dict[str, tuple[object, ...]] = {
    "device": ("4",),
    "expert_freq": ("4",),
    "pin_threads": (True,),
    "verify": (True,),
    "sigbus_guard": (True,),
    "dense_model": ("4",),
    "logit_bias": ({},),
    "temperature": (1.5,),
    "repetition_penalty": (1.5,),
    "presence_penalty": (1.5, -1),
    "frequency_penalty": (1.5, -1),
}


@pytest.mark.parametrize("value", WRONG, ids=lambda v: repr(v)[:12])
@pytest.mark.parametrize(("record", "name"), FIELDS, ids=str)
def test_wrong_value_is_refused_by_name(record: Options, name: str, value: object) -> None:
    if any(value is right or value == right for right in RIGHT.get(name, ())):
        assert getattr(record(**{name: value}), name) == value
        return
    with pytest.raises(ConfigError, match=f"{name} must be"):
        record(**{name: value})


@pytest.mark.parametrize("bias", [{"a": 1}, {1.5: 1}, {True: 1}, {1: "x"}, {1: None}, {-1: 1}])
def test_bias_of_another_form_is_refused(bias: dict[object, object]) -> None:
    with pytest.raises(ConfigError, match="logit_bias must be token ids"):
        SamplingOptions(logit_bias=bias)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    options = SamplingOptions(temperature=np.float32(0.5), seed=np.int64(3))
    assert (options.temperature, options.seed) == (0.5, 3)


def test_pairs_need_the_file_that_has_them() -> None:
    with pytest.raises(ConfigError, match="prefetch must be off, hash or gate without expert_freq"):
        EngineOptions(prefetch="pairs")
    assert EngineOptions(prefetch="pairs", expert_freq="x.json").prefetch == "pairs"


@pytest.mark.parametrize("name", ["on", "mtp", "hash,gate"])
def test_unknown_kinds_of_prefetch_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"prefetch must be one of \('off', 'hash'"):
        EngineOptions(prefetch=name)  # type: ignore[arg-type]
