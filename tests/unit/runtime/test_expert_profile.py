"""A profile counts what the model's router chose, and what tokens say about hash-routed layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from edgedsv4 import Engine, EngineOptions
from edgedsv4.errors import ConfigError
from edgedsv4.formats.route_trace import NO_GUESS, read_route_trace
from edgedsv4.runtime.expert_profile import (
    ProfileOptions,
    RouteRecorder,
    hash_layer_rates,
    profile_experts,
    route_shape,
    whole_counts,
)

TEXT = "The river runs to the sea, and the sea is wide. " * 6


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open("pocket-v4", EngineOptions(threads=1, context=256)) as opened:
        yield opened


def test_counts_are_those_of_the_trace(engine: Engine, tmp_path: Path) -> None:
    options = ProfileOptions(corpus="river", window=40, trace=tmp_path / "a.routes")
    done: list[tuple[int, int]] = []
    found = profile_experts(engine, TEXT, options, lambda *step: done.append(step))
    trace = read_route_trace(tmp_path / "a.routes")
    assert trace.shape == route_shape(engine)
    assert trace.identity_sha256 == found.identity_sha256
    assert found.identity_sha256 == engine.describe()["identity_sha256"]
    assert len(trace.ids) == found.tokens == done[-1][0] == done[-1][1]
    for layer in range(trace.shape.layers):
        counted = np.bincount(trace.ids[:, layer].ravel(), minlength=trace.shape.experts)
        assert found.counts[layer].tolist() == counted.tolist()


def test_every_window_begins_a_text(engine: Engine, tmp_path: Path) -> None:
    options = ProfileOptions(corpus="river", window=40, trace=tmp_path / "a.routes")
    found = profile_experts(engine, TEXT, options)
    trace = read_route_trace(tmp_path / "a.routes")
    assert [run.first for run in trace.runs] == list(range(0, found.tokens, 40))
    assert {(run.kind, run.begins_text) for run in trace.runs} == {("decode", True)}


def test_routes_are_those_of_the_hash_tables(engine: Engine, tmp_path: Path) -> None:
    ids = engine.tokenizer.encode(TEXT)[:39]
    window = [engine.tokenizer.bos_id, *ids]
    options = ProfileOptions(corpus="river", window=40, trace=tmp_path / "a.routes")
    profile_experts(engine, TEXT, options)
    trace = read_route_trace(tmp_path / "a.routes")
    tables = engine.hash_tables()
    assert set(tables) == {0, 1, 2}
    for layer, table in tables.items():
        assert np.array_equal(trace.ids[:40, layer], table[window])


def test_watching_changes_no_logit(engine: Engine) -> None:
    ids = engine.tokenizer.encode(TEXT)[:30]
    recorder = RouteRecorder(engine.config.num_layers, lambda _ids: None)
    with engine.new_session() as plain, engine.new_session(on_experts=recorder) as watched:
        expected = plain.evaluate(ids, logits="all")
        found = watched.evaluate(ids, logits="all")
    assert expected is not None
    assert found is not None
    assert np.array_equal(expected, found)


def test_cancelled_forward_leaves_nothing_behind() -> None:
    taken: list[npt.NDArray[np.int64]] = []
    recorder = RouteRecorder(2, taken.append)
    one, two = torch.tensor([[1, 2]]), torch.tensor([[3, 4]])
    recorder(0, one, one)
    for layer, ids in enumerate((two, one)):
        assert recorder(layer, ids, ids) is ids
    assert [ids.tolist() for ids in taken] == [[[[3, 4], [1, 2]]]]


def test_tokens_of_a_larger_text_give_the_hash_layers(engine: Engine) -> None:
    larger = "Mia is a fox. " * 20
    plain = profile_experts(engine, TEXT, ProfileOptions(corpus="river", window=64))
    options = ProfileOptions(corpus="river", window=64, token_text=larger)
    found = profile_experts(engine, TEXT, options)
    assert np.array_equal(found.counts[3:], plain.counts[3:])
    assert (found.counts.sum(axis=1) == found.tokens * 2).all()
    ids = engine.tokenizer.encode(larger)
    for layer, table in engine.hash_tables().items():
        used = np.bincount(table[ids].ravel(), minlength=8) / len(ids)
        assert np.abs(found.rates()[layer] - used).max() <= 1 / found.tokens


def test_rates_of_a_hash_layer_by_hand() -> None:
    table = np.array([[0, 1], [1, 2], [2, 3]])
    rates = hash_layer_rates(table, np.array([3, 1, 0]), experts=4)
    assert rates.tolist() == [0.75, 1.0, 0.25, 0.0]


def test_whole_counts_add_up() -> None:
    assert whole_counts(np.array([1.0, 1.0, 1.0]), 10).sum() == 10
    assert whole_counts(np.array([0.5, 0.25, 0.25]), 8).tolist() == [4, 2, 2]
    assert whole_counts(np.array([0.9, 0.0, 0.1]), 3).tolist() == [3, 0, 0]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "give one with at least two"),
        (TEXT, {"token_text": ""}, "text of tokens is empty"),
    ],
)
def test_text_without_tokens_is_refused(
    engine: Engine, text: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        profile_experts(engine, text, ProfileOptions(corpus="x", window=64, **options))  # type: ignore[arg-type]


def test_window_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2 tokens, found 1"):
        ProfileOptions(corpus="x", window=1)


def test_failed_profile_leaves_no_trace(engine: Engine, tmp_path: Path) -> None:
    options = ProfileOptions(corpus="x", window=64, trace=tmp_path / "a.routes")

    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile_experts(engine, TEXT, options, stop)
    assert list(tmp_path.iterdir()) == []


def test_trace_has_what_routers_guess_one_layer_earlier(engine: Engine, tmp_path: Path) -> None:
    options = ProfileOptions(corpus="river", window=40, trace=tmp_path / "a.routes")
    profile_experts(engine, TEXT, options)
    trace = read_route_trace(tmp_path / "a.routes")
    guesses = trace.guesses
    assert guesses is not None
    assert guesses.shape == (*trace.ids.shape[:2], 8)
    assert (guesses[:, :3] == NO_GUESS).all()  # layers that route by a table
    by_score = guesses[:, 3:]
    assert (np.sort(by_score, axis=2) == np.arange(8)).all()  # all of the model's eight
    first = by_score[:, :, :2, None] == trace.ids[:, 3:, None, :]
    assert first.any(axis=2).mean() > 0.5  # two of eight by chance name a quarter


def test_a_forward_without_guesses_takes_none_of_the_one_before() -> None:
    recorder = RouteRecorder(2, lambda _ids: seen.append(recorder.guesses))
    seen: list[npt.NDArray[np.int64] | None] = []
    ids = torch.tensor([[1, 2]])
    for has_guess in (True, False):
        recorder(0, ids, ids)
        if has_guess:
            recorder.note_guesses(1, torch.tensor([[3, 4, 5]]))
        recorder(1, ids, ids)
    recorder(0, ids, ids)
    recorder.note_guesses(1, ids)  # cancelled here
    for layer in range(2):
        recorder(layer, ids, ids)
    assert seen[0] is not None
    assert seen[0].tolist() == [[[-1, -1, -1], [3, 4, 5]]]
    assert seen[1:] == [None, None]


def test_profile_keeps_the_pairs_of_its_trace(engine: Engine, tmp_path: Path) -> None:
    options = ProfileOptions(corpus="river", window=40, trace=tmp_path / "a.routes", pairs=3)
    found = profile_experts(engine, TEXT, options).pairs
    ids = read_route_trace(tmp_path / "a.routes").ids
    assert found is not None
    assert found.experts.shape == (6, 8, 3)
    for layer in range(6):
        for expert in range(8):
            after = ids[(ids[:, layer] == expert).any(axis=1), layer + 1]
            counts = np.bincount(after.ravel(), minlength=8)
            assert found.counts[layer, expert].tolist() == sorted(counts, reverse=True)[:3]
            assert (
                counts[found.experts[layer, expert]].tolist()
                == found.counts[layer, expert].tolist()
            )


def test_absurd_numbers_of_pairs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pairs must be 0\.\.16, found 17"):
        ProfileOptions(corpus="x", pairs=17)
