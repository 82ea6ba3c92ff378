"""Saving and loading a session of 8,192 tokens of the shipped model, beside what bounds it.

Bounds of this process: SHA-256 of as many bytes, and writing and syncing them to the same folder.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import harness
import numpy as np
from harness import Figure

from edgedsv4.config import EngineOptions
from edgedsv4.formats.snapshot_file import inspect_snapshot
from edgedsv4.runtime.engine import Engine

TOKENS = 8192
OPTIONS = EngineOptions(threads=1, context=TOKENS)


def write_and_sync(path: Path, data: bytes) -> None:
    """What saving cannot do without: the bytes on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def measure(repeats: int) -> list[Figure]:
    """Times of saving and loading, to a file and in memory."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine.open("pocket-v4", OPTIONS) as engine,
        engine.new_session() as session,
    ):
        session.sync(np.random.default_rng(1).integers(3, 4096, TOKENS).tolist())
        path = Path(folder) / "talk.dsv4s"
        session.save(path)
        data = path.read_bytes()
        kv = engine.memory()["kv_used"]
        if session.save_bytes() != data or inspect_snapshot(path).length != TOKENS:
            raise RuntimeError("file and memory disagree")

        def load() -> None:
            engine.load_session(path).close()

        def load_bytes() -> None:
            engine.load_session(data).close()

        times = {
            "save": harness.seconds(lambda: session.save(path), repeats),
            "load": harness.seconds(load, repeats),
            "load into a session that holds one": harness.seconds(
                lambda: session.load(path), repeats
            ),
            "save to memory": harness.seconds(session.save_bytes, repeats),
            "load from memory": harness.seconds(load_bytes, repeats),
            "read the header": harness.seconds(lambda: inspect_snapshot(path), repeats),
        }
        floor = harness.seconds(lambda: write_and_sync(Path(folder) / "other", data), repeats)
        hashed = harness.seconds(lambda: hashlib.sha256(data).digest(), repeats)
    figures = [
        Figure("snapshot", name, 1e3 * took, "ms", repeats)
        for name, took in {**times, "save and load": times["save"] + times["load"]}.items()
    ]
    rates = {
        "save": times["save"],
        "load": times["load"],
        "write and sync alone": floor,
        "SHA-256 alone": hashed,
    }
    figures += [
        Figure("snapshot", f"{name}, rate", len(data) / took / 1e9, "GB/s", repeats)
        for name, took in rates.items()
    ]
    return [
        Figure("snapshot", "file", len(data) / 1e6, "MB", 1),
        Figure("snapshot", "file beside the state it holds", len(data) / kv, "x", 1),
        *figures,
    ]


if __name__ == "__main__":
    harness.main(measure)
