"""Checks of whole models: all layers of a random one, and the token ids of the shipped one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from edgedsv4.config import EngineOptions, SamplingOptions
from edgedsv4.runtime.engine import Engine
from edgedsv4.runtime.selftest.check import LIMIT, Check
from edgedsv4.runtime.shipped_models import POCKET_V4, RANDOM_TINY, model_path
from edgedsv4.text.messages import Message
from edgedsv4.text.prompt import PromptOptions

if TYPE_CHECKING:
    from edgedsv4.config import Backend, Dtype
    from edgedsv4.runtime.session import Session

GPU_LIMIT = 1e-4
"""Error of logits on a GPU, where sums of float32 have another order in every kernel."""
_LENGTH = 300
"""Tokens of the random model: more rows of 4 than are selected, and two rows of 128."""
_CONTEXT = 256
"""Tokens that a session of the shipped model holds: more than any case has."""


def model_checks(device: torch.device) -> Iterator[Check]:
    """The layers of a random model in float64, then the golden tokens in each profile."""
    name = str(device)
    right = cache(lambda: _random_logits("cpu", "reference", "f64"))
    yield Check(
        "layers and head of a random model",
        lambda backend: _random_logits(name, backend, "f32"),
        right,
        LIMIT if device.type == "cpu" else GPU_LIMIT,
        ("native", "triton", "reference"),
    )
    for label, options in (
        ("profile exact", EngineOptions(profile="exact")),
        ("profile default", EngineOptions(profile="default")),
        ("with drafts", EngineOptions(profile="default", draft=2)),
    ):
        yield Check(
            f"{POCKET_V4}: golden tokens, {label}",
            partial(_answered, replace(options, device=name, context=_CONTEXT)),
            _golden_tokens,
            limit=0,
            backends=("native", "triton") if options.draft else ("native", "triton", "reference"),
        )


def _random_logits(device: str, backend: Backend, dtype: Dtype) -> list[Tensor]:
    options = EngineOptions(
        device=device, backend=backend, dtype=dtype, profile="exact", context=_LENGTH
    )
    ids = np.random.Philox(key=3).random_raw(_LENGTH) % 256 + 3
    with Engine.open(RANDOM_TINY, options) as engine, engine.new_session() as session:
        logits = session.evaluate(ids.tolist(), logits="all")
    return [] if logits is None else [torch.from_numpy(logits)]


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """What the shipped model answers to one message."""

    message: str
    thinking: str
    prompt_ids: list[int]
    token_ids: list[int]


def golden_cases() -> list[GoldenCase]:
    """The cases of the file beside the model.

    Raises:
        OSError: the file is missing.
        ValueError, KeyError: it is not what it should be.
    """
    with model_path(POCKET_V4) as path:
        stored = json.loads(golden_file(path).read_text(encoding="utf-8"))
    keys = ("message", "thinking", "prompt_ids", "token_ids")
    return [GoldenCase(*(case[key] for key in keys)) for case in stored["cases"]]


def golden_file(model: Path) -> Path:
    """Where the golden tokens of a model file lie."""
    return model.with_name("golden.json")


def _golden_tokens() -> list[Tensor]:
    return [
        torch.tensor(ids) for case in golden_cases() for ids in (case.prompt_ids, case.token_ids)
    ]


def _answered(options: EngineOptions, backend: Backend) -> list[Tensor]:
    """Prompt and greedy tokens of every case, as this machine has them.

    The C kernels decode token by token. The references, which need seconds for that, say what
    follows each of the golden tokens in one prefill: if any is wrong, so is the first that differs.
    """
    results = []
    with Engine.open(POCKET_V4, replace(options, backend=backend)) as engine:
        for case in golden_cases():
            prompt = engine.render(
                [Message("user", case.message)], PromptOptions(thinking=case.thinking)
            )
            ids = engine.tokenizer.encode_pieces(prompt.pieces)
            follow = _followed if backend == "reference" else _decoded
            with engine.new_session() as session:
                results += [torch.tensor(ids), follow(session, ids, case.token_ids)]
    return results


def _decoded(session: Session, prompt_ids: list[int], token_ids: list[int]) -> Tensor:
    session.sync(prompt_ids)
    greedy = SamplingOptions(temperature=0, max_tokens=len(token_ids))
    return torch.tensor(list(session.generate(greedy)))


def _followed(session: Session, prompt_ids: list[int], token_ids: list[int]) -> Tensor:
    logits = session.evaluate([*prompt_ids, *token_ids[:-1]], logits="all")
    assert logits is not None  # as all were asked for
    return torch.from_numpy(logits[len(prompt_ids) - 1 :].argmax(axis=1))
