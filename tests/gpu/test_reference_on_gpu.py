"""A GPU gives the same numbers, by the readable operations and by its kernels.

Run on a machine with a GPU: `python -m pytest -m gpu`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numeric import assert_logits, mean_kl, top1_disagreements

from edgedsv4 import Engine, EngineOptions

pytestmark = pytest.mark.gpu

STORED = Path(__file__).parents[1] / "data" / "structure"
LIMIT = 2e-4
"""As for the CPU against the stored logits."""


def logits(
    model: str,
    device: str,
    profile: str,
    token_ids: list[int],
    chunk: int,
    backend: str = "auto",
) -> np.ndarray:
    options = EngineOptions(
        device=device, profile=profile, context=1024, threads=4, backend=backend
    )
    with Engine.open(model, options) as engine, engine.new_session() as session:
        found = session.evaluate(token_ids, logits="all", chunk=chunk)
        assert found is not None
        return found


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("chunk", [420, 37])
def test_gpu_gives_the_stored_logits(chunk: int, backend: str) -> None:
    token_ids = np.fromfile(STORED / "tokens.i32", dtype=np.int32).tolist()
    got = logits(str(STORED / "official"), "cuda", "exact", token_ids, chunk, backend)
    assert_logits("structure", got, np.load(STORED / "logits_transformers_f32.npy"), LIMIT)


def test_gpu_and_cpu_agree_on_stored_formats() -> None:
    """FP8 rows and FP4 keys: the same bytes up to values that round the other way."""
    draw = torch.Generator().manual_seed(5)
    token_ids = torch.randint(0, 256, (600,), generator=draw).tolist()
    gpu = logits("random-tiny", "cuda", "default", token_ids, 128, "reference")
    cpu = logits("random-tiny", "cpu", "default", token_ids, 128)
    assert mean_kl(cpu, gpu) < 1e-3
    assert len(top1_disagreements(cpu, gpu)) <= 12


def test_gpu_memory_is_what_the_engine_reports() -> None:
    before = torch.cuda.memory_allocated()
    options = EngineOptions(device="cuda", context=4096)
    with Engine.open("random-tiny", options) as engine, engine.new_session() as session:
        session.sync(list(range(100)))
        used = torch.cuda.memory_allocated() - before
        memory = engine.memory()
        expected = memory["mapped_weights"] + memory["kv_allocated"]
        assert used <= 1.3 * expected + (16 << 20)
