"""What starting costs: `edgedsv4 --help`, and opening a 4 GB file without reading its weights."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import harness
from harness import Figure
from tiny_model import random_tensors, tiny_config, write_gguf

PROBE = """
import resource, sys
import torch
from pathlib import Path
from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.model.weights import load_weights
def private_bytes():
    fields = dict(line.split(":") for line in open("/proc/self/smaps_rollup") if ":" in line)
    return 1024 * sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
before = private_bytes()
checkpoint = open_checkpoint(Path(sys.argv[1]))
weights = load_weights(checkpoint)
print(private_bytes() - before)
"""


def write_large(path: Path, nbytes: int) -> None:
    """A valid small model with a sparse tail, so that the file is `nbytes` long."""
    config = tiny_config()
    write_gguf(path, config, random_tensors(config, seed=1), tokenizer=True)
    with path.open("r+b") as file:
        file.truncate(nbytes)


def help_seconds(repeats: int) -> float:
    """Median wall time of the command that does nothing but print its help."""
    command = [sys.executable, "-m", "edgedsv4", "--help"]
    return harness.seconds(
        lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), repeats
    )


def open_bytes(path: Path) -> int:
    """Private memory that opening adds to a process that has imported torch."""
    found = subprocess.run(
        [sys.executable, "-c", PROBE, str(path)], check=True, capture_output=True, text=True
    )
    return int(found.stdout)


def measure(repeats: int) -> list[Figure]:
    """Both figures."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.gguf"
        write_large(path, 4 << 30)
        added = sorted(open_bytes(path) for _ in range(repeats))[repeats // 2]
    return [
        Figure("start", "--help", 1e3 * help_seconds(repeats), "ms", repeats),
        Figure("start", "memory added by opening 4 GiB", added / 1e6, "MB", repeats),
    ]


if __name__ == "__main__":
    harness.main(measure)
