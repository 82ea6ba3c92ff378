"""Evaluating a prompt in chunks equals evaluating it at once: row counts, ids, state, logits.

Torch rounds a row of a product differently when the number of rows changes, so values agree to
rounding; with every row computed alone (`row_invariant`) they agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numeric
import pytest
import torch
from memory_model import BACKENDS, chunk_sizes, evaluate, model_of, state_of
from row_invariant import compute_rows_alone
from selections import NEAR_TIE, SelectionRecord
from tiny_model import random_tensors, random_tokens, tiny_config

if TYPE_CHECKING:
    from edgedsv4.model.kv_cache import KvCache
    from edgedsv4.model.model import Model

CHUNKS = (1, 3, 4, 5, 37, 127, 128, 129)
SEED = 12
TOKENS = 300

STATE_LIMIT = 1e-5
"""Difference of cached values, relative to the largest of their tensor.

5e-7 is measured in the first layer, and each float32 layer adds what its own products round
differently: 4e-6 in the fifth with chunks of one token. A lost or stale row is of order 1.
"""


@dataclass(frozen=True)
class Run:
    """What one way of evaluating the prompt left behind."""

    logits: torch.Tensor
    cache: KvCache
    state: dict[str, torch.Tensor]
    record: SelectionRecord


@cache
def tiny(backend: str) -> Model:
    config = tiny_config()
    return model_of(config, random_tensors(config, SEED), backend=backend)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@cache
def run(chunk: int, backend: str) -> Run:
    """Evaluate the prompt in chunks, into a timeline whose memory was NaN before."""
    model = tiny(backend)
    timeline = model.new_cache(TOKENS)
    for stores in compressed_stores(timeline):
        stores.fill_(torch.nan)
    record = SelectionRecord(timeline)
    token_ids = random_tokens(model.config, TOKENS, SEED)
    sizes = chunk_sizes(TOKENS, chunk)
    logits = evaluate(model, token_ids, cache=timeline, sizes=sizes, hooks=record.hooks())
    return Run(logits, timeline, state_of(model, timeline), record)


def compressed_stores(timeline: KvCache) -> Iterator[torch.Tensor]:
    """The whole memory of compressed rows and index keys, layer by layer."""
    for layer in timeline.layers.values():
        for part in (layer.compressor, layer.indexer):
            if part is not None:
                yield from part.rows.stored(TOKENS)


def rows_written(timeline: KvCache) -> list[int]:
    """Rows of each store that are no longer NaN."""
    return [int((~rows.isnan()).all(dim=1).sum()) for rows in compressed_stores(timeline)]


def test_the_prompt_has_no_near_tie(backend: str) -> None:
    hashed = range(tiny(backend).config.num_hash_layers)
    margins = run(TOKENS, backend).record.margins.items()
    assert min(m for (kind, layer, _), m in margins if kind == "topk" or layer not in hashed) > (
        10 * NEAR_TIE
    )


def test_one_prefill_writes_one_row_per_finished_window(backend: str) -> None:
    model, timeline = tiny(backend), run(TOKENS, backend).cache
    expected = [
        TOKENS // ratio
        for ratio in model.config.compress_ratios
        for _ in range({0: 0, 4: 2, 128: 1}[ratio])
    ]
    assert rows_written(timeline) == expected


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_write_the_same_rows(chunk: int, backend: str) -> None:
    assert run(chunk, backend).cache.length == TOKENS
    assert rows_written(run(chunk, backend).cache) == rows_written(run(TOKENS, backend).cache)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_select_the_same_rows(chunk: int, backend: str) -> None:
    assert run(chunk, backend).record.topk == run(TOKENS, backend).record.topk


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_select_the_same_experts(chunk: int, backend: str) -> None:
    assert run(chunk, backend).record.experts == run(TOKENS, backend).record.experts


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_leave_the_same_state(chunk: int, backend: str) -> None:
    got, whole = run(chunk, backend).state, run(TOKENS, backend).state
    assert got.keys() == whole.keys()
    for name, expected in whole.items():
        numeric.assert_within_tensor_max(name, got[name], expected, STATE_LIMIT)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_give_the_same_logits(chunk: int, backend: str) -> None:
    numeric.assert_logits("logits", run(chunk, backend).logits, run(TOKENS, backend).logits, 2e-4)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_keep_the_same_positions_for_rewind(chunk: int, backend: str) -> None:
    assert run(chunk, backend).cache.rewind_floor == run(TOKENS, backend).cache.rewind_floor


@dataclass(frozen=True)
class Bits:
    """State and logits of one way of evaluating, every row computed alone."""

    logits: torch.Tensor
    state: dict[str, torch.Tensor]


EXACT_TOKENS = 150


def exact_bits(sizes: list[int], backend: str = "reference") -> Bits:
    model = tiny(backend)
    timeline = model.new_cache(EXACT_TOKENS)
    token_ids = random_tokens(model.config, EXACT_TOKENS, SEED)
    logits = evaluate(model, token_ids, cache=timeline, sizes=sizes)
    return Bits(logits, state_of(model, timeline))


@pytest.fixture(scope="module")
def whole_bits() -> Bits:
    with pytest.MonkeyPatch.context() as patch:
        compute_rows_alone(patch)
        return exact_bits([EXACT_TOKENS])


EXACT_SIZES = pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([1] * EXACT_TOKENS, id="1"),
        pytest.param(chunk_sizes(EXACT_TOKENS, 3), id="3"),
        pytest.param(chunk_sizes(EXACT_TOKENS, 5), id="5"),
        pytest.param([127, 23], id="127"),
        pytest.param([128, 22], id="128"),
        pytest.param([129, 1, 7, 13], id="129 and odd ones"),
    ],
)


def assert_same_bits(got: Bits, expected: Bits) -> None:
    numeric.assert_same_bits("logits", got.logits, expected.logits)
    assert got.state.keys() == expected.state.keys()
    for name, values in expected.state.items():
        numeric.assert_same_bits(name, got.state[name], values)


@EXACT_SIZES
def test_chunks_equal_one_prefill_bit_for_bit_when_rows_are_computed_alone(
    sizes: list[int], whole_bits: Bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_rows_alone(monkeypatch)
    assert_same_bits(exact_bits(sizes), whole_bits)


@EXACT_SIZES
def test_native_chunks_equal_one_prefill_bit_for_bit(sizes: list[int]) -> None:
    assert_same_bits(exact_bits(sizes, "native"), exact_bits([EXACT_TOKENS], "native"))


def test_float64_and_float32_agree(backend: str) -> None:
    model = tiny(backend)
    wide = model_of(model.config, random_tensors(model.config, SEED), dtype=torch.float64)
    token_ids = random_tokens(model.config, TOKENS, SEED)
    got = evaluate(wide, token_ids)
    assert got.dtype == torch.float64
    numeric.assert_logits("float32 against float64", run(TOKENS, backend).logits, got, 1e-4)


def test_float64_chunks_agree_to_float64_rounding() -> None:
    model = tiny("reference")
    wide = model_of(model.config, random_tensors(model.config, SEED), dtype=torch.float64)
    token_ids = random_tokens(model.config, TOKENS, SEED)
    got = evaluate(wide, token_ids, sizes=chunk_sizes(TOKENS, 37))
    numeric.assert_logits("chunks in float64", got, evaluate(wide, token_ids), 1e-11)
