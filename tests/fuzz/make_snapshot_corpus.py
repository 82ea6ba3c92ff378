"""Writes the corpus of the snapshot fuzzer: `python tests/fuzz/make_snapshot_corpus.py`."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from snapshot_samples import TURNS, header_of, sample

from edgedsv4.formats.snapshot_turns import encode_turns

FOLDER = Path(__file__).parent / "corpus" / "snapshot"


def main() -> None:
    """One input of each kind that is accepted, and their empty forms."""
    data = sample()
    header = header_of(data)
    for entry in header["sections"]:
        entry[2] = hashlib.sha256(bytes(entry[1])).hexdigest()
    empty = header | {"tokens": 0, "rings": [0] * 6, "checkpoints": [], "streams_first": None}
    empty |= {"has_logits": False}
    empty["sections"] = [[name, 0, hashlib.sha256().hexdigest()] for name, *_ in header["sections"]]
    FOLDER.mkdir(parents=True, exist_ok=True)
    inputs = {
        "file": b"\0" + data,
        "header": b"\1" + json.dumps(header).encode(),
        "header-empty": b"\1" + json.dumps(empty).encode(),
        "turns": b"\2" + encode_turns(TURNS),
        "turns-none": b"\2" + encode_turns([]),
    }
    for name, content in inputs.items():
        (FOLDER / name).write_bytes(content)


if __name__ == "__main__":
    main()
