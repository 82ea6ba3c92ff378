"""The forward as a whole: what it refuses, what it leaves behind when it fails, what hooks see."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numeric import assert_close, assert_same_bits
from scalar_codecs import fp4_row, fp8_row
from tiny_model import random_tensors, random_tokens, tiny_config, write_official

from edgedsv4.errors import CancelledError, ConfigError, NumericError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize
from edgedsv4.model import attention, indexer
from edgedsv4.model.hooks import ForwardHooks
from edgedsv4.model.kv_cache import KvCache, Numerics
from edgedsv4.model.model import Model, embed
from edgedsv4.model.row_store import Fp4Rows, Fp8Rows
from edgedsv4.model.weights import load_weights

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
CONFIG = tiny_config()
Loader = Callable[..., Model]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    folder = tmp_path_factory.mktemp("model")
    write_official(folder, CONFIG, random_tensors(CONFIG, seed=3))
    return lambda **numerics: load(folder, **numerics)


def load(folder: Path, profile: Any = "exact", dtype: torch.dtype = torch.float32) -> Model:
    checkpoint = open_checkpoint(folder)
    weights, experts = load_weights(checkpoint)
    numerics = Numerics(profile=profile, dtype=dtype, device=CPU)
    return Model(checkpoint.config, weights, experts, numerics)


def tokens(count: int, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(random_tokens(CONFIG, count, seed))


def stored_state(cache: KvCache) -> list[torch.Tensor]:
    """Everything a cache holds that later tokens could read."""
    parts: list[torch.Tensor] = []
    for layer in cache.layers.values():
        for ring in layer.rings():
            parts += ring.stored(max(ring.oldest, cache.length - 40), cache.length)
        for compressed in (layer.compressor, layer.indexer):
            if compressed is not None:
                rows = cache.length // layer.plan.ratio
                parts += [part.clone() for part in compressed.rows.stored(rows)]
    return parts


def assert_unchanged(cache: KvCache, length: int, before: list[torch.Tensor]) -> None:
    assert cache.length == length
    for index, (was, now) in enumerate(zip(before, stored_state(cache), strict=True)):
        assert_same_bits(f"state part {index}", now, was)


@pytest.mark.parametrize("profile", ["exact", "default"])
def test_logits_of_the_last_row_are_the_last_of_all(loaded: Loader, profile: str) -> None:
    model = loaded(profile=profile)
    whole = model.forward(tokens(50), model.new_cache(64), logits="all").logits
    last = model.forward(tokens(50), model.new_cache(64)).logits
    assert whole is not None
    assert last is not None
    assert whole.shape == (50, CONFIG.vocab_size)
    assert_close("last row", last, whole[-1:])


def test_no_logits_are_computed_when_none_are_asked_for(loaded: Loader) -> None:
    model = loaded()
    assert model.forward(tokens(5), model.new_cache(8), logits="none").logits is None


def test_bfloat16_stays_close_to_float32(loaded: Loader) -> None:
    wide, narrow = loaded(), loaded(dtype=torch.bfloat16)
    expected = wide.forward(tokens(1), wide.new_cache(8)).logits
    got = narrow.forward(tokens(1), narrow.new_cache(8)).logits
    assert got is not None
    assert got.dtype == torch.float32
    assert_close("logits", got, expected, limit=0.1)


def test_float64_agrees_with_float32(loaded: Loader) -> None:
    wide, narrow = loaded(dtype=torch.float64), loaded()
    expected = wide.forward(tokens(40), wide.new_cache(64), logits="all").logits
    got = narrow.forward(tokens(40), narrow.new_cache(64), logits="all").logits
    assert_close("logits", got, expected)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([0, 384], "found 384"), ([-1], "found -1"), (list(range(9)), "exceed the capacity 8")],
)
def test_tokens_that_cannot_be_evaluated_are_refused(
    loaded: Loader, ids: list[int], message: str
) -> None:
    model = loaded()
    cache = model.new_cache(8)
    with pytest.raises(ConfigError, match=message):
        model.forward(torch.tensor(ids), cache)
    assert cache.length == 0


@pytest.mark.parametrize("calls", [0, 1, 7, 30])
@pytest.mark.parametrize("profile", ["exact", "default"])
def test_a_cancelled_forward_leaves_the_state_as_it_was(
    loaded: Loader, profile: str, calls: int
) -> None:
    model = loaded(profile=profile)
    cache = model.new_cache(512)
    model.forward(tokens(131), cache)
    before = stored_state(cache)
    asked = iter(range(10_000))
    hooks = ForwardHooks(should_stop=lambda: next(asked) >= calls)
    with pytest.raises(CancelledError):
        model.forward(tokens(200, seed=2), cache, hooks=hooks)
    assert_unchanged(cache, 131, before)
    again = model.forward(tokens(9, seed=3), cache).logits
    fresh = model.new_cache(512)
    model.forward(tokens(131), fresh)
    expected = model.forward(tokens(9, seed=3), fresh).logits
    assert again is not None
    assert expected is not None
    assert_same_bits("logits after a cancel", again, expected)


def test_ctrl_c_inside_a_forward_leaves_the_state_as_it_was(loaded: Loader) -> None:
    model = loaded()
    cache = model.new_cache(64)
    model.forward(tokens(10), cache)
    before = stored_state(cache)

    def interrupt() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.forward(tokens(5), cache, hooks=ForwardHooks(should_stop=interrupt))
    assert_unchanged(cache, 10, before)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_damaged_weight_is_a_numeric_error_at_its_first_position(
    tmp_path: Path, bad: float
) -> None:
    damaged = random_tensors(CONFIG, seed=3)
    damaged["embed.weight"][7, 5] = bad
    write_official(tmp_path, CONFIG, damaged)
    model = load(tmp_path)
    cache = model.new_cache(64)
    model.forward(torch.tensor([1, 2]), cache)
    before = stored_state(cache)
    with pytest.raises(NumericError, match="at position 4"):
        model.forward(torch.tensor([3, 4, 7, 5]), cache)
    assert_unchanged(cache, 2, before)


def test_a_damaged_head_is_a_numeric_error(tmp_path: Path) -> None:
    damaged = random_tensors(CONFIG, seed=3)
    damaged["head.weight"][9] = np.nan
    write_official(tmp_path, CONFIG, damaged)
    model = load(tmp_path)
    cache = model.new_cache(64)
    with pytest.raises(NumericError, match="logit"):
        model.forward(torch.tensor([3]), cache)
    assert cache.length == 0


def test_hooks_see_and_replace_selections(loaded: Loader) -> None:
    model = loaded()
    seen: dict[str, list[tuple[int, torch.Tensor]]] = {"rows": [], "experts": []}

    def rows(layer: int, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        seen["rows"].append((layer, scores))
        return ids

    def experts(layer: int, _scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        seen["experts"].append((layer, ids))
        return torch.zeros_like(ids) if layer == 3 else ids

    hooks = ForwardHooks(on_topk=rows, on_experts=experts)
    plain = model.forward(tokens(60), model.new_cache(64)).logits
    steered = model.forward(tokens(60), model.new_cache(64), hooks=hooks).logits
    assert [layer for layer, _ in seen["rows"]] == [1, 3]
    assert all(scores.shape == (60, 15) for _, scores in seen["rows"])
    assert torch.isinf(seen["rows"][0][1][0]).all()
    assert [layer for layer, _ in seen["experts"]] == [0, 1, 2, 3, 4]
    assert plain is not None
    assert steered is not None
    assert not torch.allclose(plain, steered)


@pytest.mark.parametrize("profile", ["exact", "default"])
def test_tiles_of_any_size_select_and_attend_alike(
    loaded: Loader, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(profile=profile)
    selected: list[torch.Tensor] = []

    def keep(_layer: int, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        selected.extend((scores, ids.sort().values))
        return ids

    hooks = ForwardHooks(on_topk=keep)
    whole = model.forward(tokens(300), model.new_cache(512), logits="all", hooks=hooks).logits
    whole_selected, selected = selected, []
    monkeypatch.setattr(indexer, "KEY_TILE", 7)
    monkeypatch.setattr(indexer, "SCORE_WORKSPACE_BYTES", 5 * 32 * 7 * 8)
    monkeypatch.setattr(attention, "ATTENTION_WORKSPACE_BYTES", 200_000)
    tiled = model.forward(tokens(300), model.new_cache(512), logits="all", hooks=hooks).logits
    for was, now in zip(whole_selected, selected, strict=True):
        if was.is_floating_point():
            assert_close("scores", now.nan_to_num(neginf=0), was.nan_to_num(neginf=0))
        else:
            assert torch.equal(was, now)
    assert_close("logits", tiled, whole)


def test_the_default_cache_holds_the_bytes_of_the_definition(
    loaded: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row that goes into the cache, coded again one number at a time, is found in it."""
    coded: list[tuple[bytes, bytes]] = []

    def watch(codec: type[Fp8Rows | Fp4Rows], code: Callable[[list[float]], Any]) -> None:
        encode = codec.encode

        def watched(self: Any, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
            coded.extend(code(row) for row in rows[-20:].to(torch.bfloat16).double().tolist())
            return encode(self, rows)

        monkeypatch.setattr(codec, "encode", watched)

    watch(Fp8Rows, lambda row: fp8_row(row, CONFIG.rope_dim))
    watch(Fp4Rows, fp4_row)
    model = loaded(profile="default")
    cache = model.new_cache(256)
    model.forward(tokens(150), cache)
    stored = {
        bytes(row.tolist())
        for part in stored_state(cache)
        if part.dtype == torch.uint8
        for row in part
    }
    windows, compressed, keys = 5 * 20, 2 * 20 + 1, 2 * 20
    assert len(coded) == windows + compressed + keys
    assert all({data, scales} <= stored for data, scales in coded)


def test_embedding_rows_under_shared_scales_are_decoded_in_place() -> None:
    """An FP8 embedding has one scale per 128 rows, so its rows cannot be gathered as bytes."""
    codes = torch.randint(0, 120, (300, 40), generator=torch.Generator().manual_seed(2))
    scale = torch.tensor([[120], [127], [130]], dtype=torch.uint8)
    matrix = QuantMatrix(BLOCK_TYPES["FP8_E4M3"], 300, 40, codes.to(torch.uint8), scale)
    ids = torch.tensor([299, 0, 128, 127])
    assert torch.equal(embed(matrix, ids, torch.float32), dequantize(matrix)[ids])
