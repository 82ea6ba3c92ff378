"""One set of options: the command line's flags, the structs of C and the records of Python."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from edgedsv4 import EngineOptions, ExpertStats, PromptOptions, SamplingOptions
from edgedsv4.capi.bridge import ffi
from edgedsv4.capi.chat import _DEFAULTS as PROMPT
from edgedsv4.capi.chat import prompt_options_of
from edgedsv4.capi.header import header_path
from edgedsv4.capi.model import _DEFAULTS as ENGINE
from edgedsv4.capi.model import options_of
from edgedsv4.capi.sampling import _DEFAULTS as SAMPLING
from edgedsv4.capi.sampling import sampling_options_of
from edgedsv4.capi.session import _Outcome
from edgedsv4.cli.flags import CLI_ENGINE_CHOICES, ENGINE_FLAGS, SAMPLING_FLAGS

NOT_OPTIONS = ("struct_size", "reserved")


def members(kind: str) -> set[str]:
    return {name for name, _ in ffi.typeof(kind).fields if name not in NOT_OPTIONS}


def names(record: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(record)}


def test_engine_options_have_the_same_names() -> None:
    flags = {flag.field for flag in ENGINE_FLAGS}
    assert members("dsv4_engine_options") == names(EngineOptions)
    assert flags | set(CLI_ENGINE_CHOICES) == names(EngineOptions)


def test_sampling_options_have_the_same_names() -> None:
    structs = members("dsv4_sampling_options") - {"bias", "bias_count"} | {"logit_bias"}
    assert structs == names(SamplingOptions)
    assert {flag.field for flag in SAMPLING_FLAGS} == names(SamplingOptions)


def test_prompt_options_have_the_same_names() -> None:
    structs = {name.removesuffix("_json") for name in members("dsv4_prompt_options")}
    # A prefix is a property of the message in C, and dropping is the other side of keeping.
    others = names(PromptOptions) - {"continue_final", "drop_thinking"}
    assert structs - {"keep_thinking"} == others


@pytest.mark.parametrize(
    ("read", "defaults", "record"),
    [
        (options_of, ENGINE, EngineOptions()),
        (sampling_options_of, SAMPLING, SamplingOptions()),
        (prompt_options_of, PROMPT, PromptOptions()),
    ],
    ids=["engine", "sampling", "prompt"],
)
def test_defaults_are_the_same(read: Any, defaults: Any, record: Any) -> None:
    assert read(defaults) == record
    assert read(ffi.NULL) == record


@pytest.mark.parametrize("field", dataclasses.fields(EngineOptions), ids=lambda field: field.name)
def test_every_engine_option_is_taken_over(field: dataclasses.Field[Any]) -> None:
    other = {
        "device": "cuda:1",
        "profile": "exact",
        "backend": "reference",
        "dtype": "f64",
        "draft_model": "x.gguf",
        "dense_model": "y.gguf",
        "cpu_experts": "off",
        "expert_place": "stored",
        "expert_freq": "x.json",
        "io": "direct",
        "prefetch": "off",
        "expert_verify": "full",
    }
    struct = ffi.new("dsv4_engine_options *", ENGINE[0])
    if field.name == "draft_model":
        # It means nothing without drafts.
        struct.draft = 1
    value: Any = other.get(field.name, 3)
    kept = ffi.new("char[]", value.encode()) if isinstance(value, str) else value
    setattr(struct, field.name, kept)
    expected = True if isinstance(field.default, bool) else value
    assert getattr(options_of(struct), field.name) == expected


@pytest.mark.parametrize("name", sorted(members("dsv4_sampling_options") - {"bias", "bias_count"}))
def test_every_sampling_option_is_taken_over(name: str) -> None:
    struct = ffi.new("dsv4_sampling_options *", SAMPLING[0])
    value = 0.5 if isinstance(getattr(SAMPLING, name), float) else 3
    setattr(struct, name, value)
    assert getattr(sampling_options_of(struct), name) == value


def test_biases_are_taken_over() -> None:
    struct = ffi.new("dsv4_sampling_options *", SAMPLING[0])
    struct.bias = pairs = ffi.new("dsv4_bias[]", [(3, 0.5), (7, float("-inf"))])
    struct.bias_count = len(pairs)
    assert sampling_options_of(struct).logit_bias == {3: 0.5, 7: float("-inf")}


@pytest.mark.parametrize(
    ("member", "said", "default"),
    [
        ("temperature", "by default 1;", SamplingOptions().temperature == 1),
        ("top_p", "1, the default", SamplingOptions().top_p == 1),
        ("min_p", "by default 0", SamplingOptions().min_p == 0),
        ("repetition_penalty", "1, the default", SamplingOptions().repetition_penalty == 1),
        ("presence_penalty", "by default 0", SamplingOptions().presence_penalty == 0),
        ("frequency_penalty", "by default 0", SamplingOptions().frequency_penalty == 0),
        ("top_k", "0, the default", SamplingOptions().top_k == 0),
        ("seed", "-1, the default", SamplingOptions().seed is None),
        ("max_tokens", "0, the default", SamplingOptions().max_tokens is None),
        ("thinking", '"high" (the default)', PromptOptions().thinking == "high"),
        ("prefill_chunk", "0: 256", EngineOptions().chunk == 256),
        ("draft", "0 (the default)", EngineOptions().draft == 0),
        ("device", '"auto" (the default)', EngineOptions().device == "auto"),
        ("backend", '"auto" (the default)', EngineOptions().backend == "auto"),
        ("dtype", '"f32" (the default)', EngineOptions().dtype == "f32"),
        ("checkpoint_bytes", "by default 2^30", EngineOptions().checkpoint_bytes == 1 << 30),
    ],
)
def test_the_header_says_the_defaults(member: str, said: str, default: bool) -> None:
    text = header_path().read_text(encoding="utf-8")
    comment = re.search(rf"\b\*?{member};\s*/\*(.*?)\*/", text, re.DOTALL)
    assert comment is not None
    assert said in comment[1]
    assert default


def test_a_result_tells_where_experts_came_from() -> None:
    outcome = _Outcome(ffi.NULL)
    read_ahead = {"prefetched": 9, "prefetch_hits": 2, "prefetch_late": 1, "prefetch_wasted": 4}
    guesses = {"guess_misses": 8, "guess_hits": 6}
    experts = ExpertStats(
        ram_hits=5, disk_reads=3, read_bytes=7 << 32, stall_seconds=0.5, **read_ahead, **guesses
    )
    outcome.take_experts(experts)
    found = outcome.struct
    for name, value in (read_ahead | guesses).items():
        assert getattr(found, f"expert_{name}") == value
    assert (found.expert_hits, found.expert_misses) == (5, 5)
    assert (found.expert_bytes_read, found.expert_stall_seconds) == (7 << 32, 0.5)
