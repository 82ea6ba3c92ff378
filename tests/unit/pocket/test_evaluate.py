"""Judging replies and given answers, and the table of an evaluation."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from pocket.documents import Check, Document, DocumentEncoder, chat
from pocket.eval_tasks import TASKS, Setting, selected, share_row
from pocket.evaluate import main
from pocket.judging import (
    ForcedLogits,
    Given,
    Logits,
    Watch,
    judge_given,
    judge_reply,
    judge_turns,
    open_model,
    random_selection,
    through_model,
    through_session,
)

import edgedsv4
from edgedsv4 import Engine, EngineOptions

FOLDER = Path(edgedsv4.__file__).parent / "data" / "pocket-v4"
MODEL = FOLDER / "pocket-v4.gguf"


def given(targets: Sequence[int]) -> Given:
    """Token ids 0, 1, 2, ... of which some are targets."""
    is_target = np.zeros(8, dtype=np.bool_)
    is_target[list(targets)] = True
    return Given(list(range(8)), is_target, nats=0.0)


def says_next(wrong: Sequence[int] = ()) -> ForcedLogits:
    """Logits that give every next token probability 1/2, and where `wrong` another one more."""

    def forced(ids: Sequence[int], start: int) -> Logits:
        logits = np.full((len(ids) - start, 9), -np.inf, dtype=np.float32)
        for row, token in enumerate(ids[start:]):
            logits[row, [token + 1, 0]] = 0.0
            logits[row, 0] = 1.0 if token + 1 in wrong else -1e-3
        return logits

    return forced


def test_every_turn_is_judged_by_itself() -> None:
    turns = judge_turns(says_next(wrong=[6]), given([2, 3, 6, 7]))
    assert [(turn.tokens, turn.right, turn.is_exact) for turn in turns] == [
        (2, 2, True),
        (2, 1, False),
    ]


def test_likelihood_counts_targets_only() -> None:
    found = judge_given(says_next(), given([2, 5]))
    assert found.tokens == 2
    assert found.nll == pytest.approx(2 * np.log(2), abs=2e-3)


def test_random_rows_are_visible_ones() -> None:
    scores = torch.zeros(4, 10)
    scores[:, 6:] = -torch.inf
    scores[0] = -torch.inf
    hook = random_selection(seed=1).on_topk
    assert hook is not None
    ids = hook(2, scores, torch.zeros(4, 8, dtype=torch.int64))
    assert sorted(ids[0].tolist()) == [-1] * 8
    assert sorted(ids[1].tolist()) == [-1, -1, 0, 1, 2, 3, 4, 5]


def test_session_and_model_give_the_same_logits() -> None:
    ids = [0, *range(300, 340)]
    options = EngineOptions(threads=1, profile="exact")
    with Engine.open(MODEL, options) as engine, open_model(MODEL, profile="exact") as model:
        ours = through_session(engine)(ids, 30)
        theirs = through_model(model, random_selection(seed=1))(ids, 30)
    assert ours.shape == (11, 4096)
    np.testing.assert_allclose(ours, theirs, atol=1e-3)


def test_a_wrong_expectation_scores_nothing() -> None:
    documents = [
        Document(task="copy", messages=chat([("Copy these words: cat hat", said)]),
                 checks={1: Check(said, "words")})
        for said in ("cat hat", "hat cat")
    ]  # fmt: skip
    with Engine.open(MODEL, EngineOptions(threads=1)) as engine, engine.new_session() as session:
        scores = [judge_reply(session, document, 1).score for document in documents]
    assert scores == [1.0, 0.0]


def test_drafts_are_counted_at_targets_and_experts_at_every_token() -> None:
    document = Document(task="copy", messages=chat([("Copy these words: cat hat", "cat hat")]))
    with Engine.open(MODEL, EngineOptions(threads=1)) as engine:
        one = Given.of(document, DocumentEncoder(engine.tokenizer))
    with open_model(MODEL, draft=FOLDER / "mtp-pocket-v4.gguf") as model:
        watch = Watch(model)
        watch.add(one)
    assert watch.drafted == int(one.is_target[2:].sum())
    assert 0 < watch.accepted <= watch.drafted
    assert watch.loads.sum(dim=1).tolist() == [2 * len(one.ids)] * 7 + [2 * (len(one.ids) - 1)]


def test_a_share_comes_with_its_interval() -> None:
    (row,) = share_row("copy", "right replies", [1.0, 1.0, 0.0, 1.0], "greedy")
    assert row.low is not None
    assert row.high is not None
    assert row.low < row.value == 0.75 < row.high


def test_no_scores_give_no_row() -> None:
    assert share_row("copy", "right replies", [], "greedy") == []


def test_tasks_are_selected_by_kind_or_set() -> None:
    assert {task.figure.__name__ for task in selected(["recall:"])} == {"recall"}
    assert [task.name for task in selected(["kl-q8"])] == ["kl-q8_0"]
    assert len({task.label for task in TASKS}) == len(selected([])) == len(TASKS)


def test_nothing_is_begun_after_the_time_limit() -> None:
    setting = Setting(model=MODEL, deadline=time.time() - 1)
    assert all(task.run(setting) == [] for task in TASKS)


def test_command_writes_rows_with_the_hash_of_the_file(tmp_path: Path) -> None:
    out = tmp_path / "eval.json"
    sets = "replies:identity,replies:wordnet"
    assert main([str(MODEL), "--items", "10", "--sets", sets, "--out", str(out)]) == 0
    found = json.loads(out.read_text("utf-8"))
    assert [row["measure"] for row in found["rows"]] == ["right replies", "ended by the model"]
    assert found["left_out"] == ["replies:wordnet-common"]
    assert found["sha256"][MODEL.name] == hashlib.sha256(MODEL.read_bytes()).hexdigest()


def test_command_refuses_what_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "none.gguf"
    path.write_bytes(b"no model")
    assert main([str(path), "--sets", "replies:identity"]) == 2
