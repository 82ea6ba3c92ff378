"""Teacher-forced scores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pocket import quick_eval
from pocket.network import Mode, Network
from pocket.parameters import from_official
from pocket.quick_eval import Evaluation, Sample, batches, evaluate
from pocket.store import TARGET_BIT, TOKEN_MASK
from tiny_model import random_tensors, tiny_config


@pytest.fixture(scope="module")
def network() -> Network:
    config = tiny_config(num_draft_layers=1, compress_ratios=(0, 4), index_heads=4)
    arrays = random_tensors(config, 1)
    return Network(
        config, from_official(config, {n: torch.from_numpy(a) for n, a in arrays.items()})
    )


def sample(length: int, seed: int, name: str = "set") -> Sample:
    codes = np.random.default_rng(seed).integers(3, 300, length).astype(np.uint16)
    codes[0] = 0
    codes[length // 2 :] |= TARGET_BIT
    return Sample(name, codes, nats=0.5)


def said(network: Network, codes: np.ndarray) -> torch.Tensor:
    """Logits of every position of one document."""
    with torch.no_grad():
        ids = torch.from_numpy((codes & TOKEN_MASK).astype(np.int64))[None]
        batch = network.sequences(ids, Mode())
        return network.logits(network.trunk(batch))[: len(codes)]


def run(network: Network, samples: list[Sample]) -> Evaluation:
    return evaluate(network, samples, Mode(), batch_tokens=1 << 12)


def test_loss_is_that_of_the_target_tokens(network: Network) -> None:
    one = sample(40, 1)
    ids = torch.from_numpy((one.codes & TOKEN_MASK).astype(np.int64))
    losses = torch.nn.functional.cross_entropy(
        said(network, one.codes)[:-1], ids[1:], reduction="none"
    )
    score = run(network, [one]).scores["set"]
    assert score.tokens == 20
    assert score.loss == pytest.approx(float(losses[19:].sum()), rel=1e-4)


def test_padding_in_a_batch_changes_nothing(network: Network) -> None:
    short, long = sample(33, 1, "short"), sample(90, 2, "long")
    together = run(network, [long, short]).scores
    for one in (short, long):
        alone = run(network, [one]).scores[one.set_name]
        assert together[one.set_name].loss == pytest.approx(alone.loss, rel=1e-4)
        assert together[one.set_name].drafted == alone.drafted


def test_document_counts_as_exact_when_greedy_decoding_would_write_it(network: Network) -> None:
    one = sample(30, 4)
    for position in range(15, 30):
        best = int(said(network, one.codes)[position - 1].argmax())
        one.codes[position] = best | TARGET_BIT
    missed = sample(30, 4)
    scores = run(network, [one, Sample("missed", missed.codes, 0.0)]).scores
    assert scores["set"].summary()["exact"] == 1
    assert scores["set"].summary()["token_accuracy"] == 1
    assert scores["missed"].summary()["exact"] == 0


def test_batches_hold_documents_of_like_length() -> None:
    samples = [sample(length, length) for length in (10, 50, 12, 48)]
    lengths = [[len(one.codes) for one in batch] for batch in batches(samples, 100)]
    assert lengths == [[10, 12], [48, 50]]


def test_nothing_is_begun_after_the_deadline(network: Network) -> None:
    result = evaluate(network, [sample(30, 1)], Mode(), batch_tokens=100, deadline=0.0)
    assert not result.scores


def test_report_is_plain_json(network: Network) -> None:
    report = run(network, [sample(30, 1)]).report()
    assert json.loads(json.dumps(report)) == report
    assert len(report["load_max_over_mean"]) == network.config.num_layers + 1


def test_command_reports_missing_weights(tmp_path: Path) -> None:
    arguments = ["--validation", str(tmp_path), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert quick_eval.main([str(tmp_path / "nothing"), "--config", "ci-v4", *arguments]) == 2
