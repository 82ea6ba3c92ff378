"""Rows that no model wrote, under right checksums: numbers or a typed error, never a crash."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from snapshot_samples import section_of, with_section
from snapshot_sessions import GREEDY, TEXT, options, write_model

from edgedsv4.errors import NumericError
from edgedsv4.runtime.engine import Engine

STORES = ("window_rows", "compressed_rows", "index_keys", "partial_windows", "draft_streams")
SMALL = {"compress_ratios": (0, 4, 128), "num_hash_layers": 1}
FEW = replace(GREEDY, max_tokens=6)
CONTENTS = {
    "random": lambda size: np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8),
    "ones": lambda size: np.full(size, 0xFF, dtype=np.uint8),
    "NaN codes": lambda size: np.full(size, 0x7F, dtype=np.uint8),
    "zeros": lambda size: np.zeros(size, dtype=np.uint8),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", **SMALL)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("profile", ["default", "exact"])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_hostile_rows_end_in_tokens_or_in_a_numeric_error(
    model: Path, backend: str, profile: str, content: str
) -> None:
    chosen = options(backend=backend, profile=profile, draft=2)
    with Engine.open(model, chosen) as engine, engine.new_session() as live:
        live.sync(TEXT[:270])
        saved = live.save_bytes()
        for name in STORES:
            rows = CONTENTS[content](len(section_of(saved, name)))
            with engine.load_session(with_section(saved, name, rows.tobytes())) as session:
                ids: list[int] = []
                with suppress(NumericError):
                    for token_id in session.generate(FEW):
                        ids.append(token_id)  # noqa: PERF402  # those before an error count
                assert all(0 <= token_id < 384 for token_id in ids)
                assert session.length == 270 + len(ids)
                # And it is as usable as any session.
                session.sync(TEXT[:40])
                assert np.isfinite(session.logits()).all()
