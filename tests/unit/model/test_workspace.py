"""The working memory of a forward depends on the chunk, not on how long the timeline is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tiny_model import random_tensors, tiny_config, write_official

from edgedsv4.model.indexer import SCORE_WORKSPACE_BYTES

PROBE = """
import sys
from pathlib import Path
import torch
from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.model.kv_cache import Numerics
from edgedsv4.model.model import Model
from edgedsv4.model.weights import load_weights

torch.set_num_threads(1)

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

def peak_of(work):
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status("VmRSS:")
    work()
    return status("VmHWM:") - before

checkpoint = open_checkpoint(Path(sys.argv[1]))
weights, experts = load_weights(checkpoint)
numerics = Numerics(profile="default", dtype=torch.float32, device=torch.device("cpu"))
model = Model(checkpoint.config, weights, experts, numerics)
cache = model.new_cache(13_000)
draw = torch.Generator().manual_seed(1)
ids = torch.randint(0, checkpoint.config.vocab_size, (13_000,), generator=draw)

def forward(count):
    model.forward(ids[cache.length : cache.length + count], cache, logits="none")

while cache.length < 2048:
    forward(256)
early = peak_of(lambda: forward(256))
while cache.length < 12_288:
    forward(256)
late = peak_of(lambda: forward(256))
print(early, late)
"""


def test_a_chunk_takes_the_same_memory_late_in_a_timeline(tmp_path: Path) -> None:
    """Untiled scores of all heads over 3,072 rows would take 200 MB."""
    config = tiny_config(compress_ratios=(0, 4, 128), num_hash_layers=1)
    write_official(tmp_path, config, random_tensors(config, seed=2))
    found = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path)], check=True, capture_output=True, text=True
    )
    early, late = map(int, found.stdout.split())
    limit = early + SCORE_WORKSPACE_BYTES
    assert late <= limit, f"{early:,} bytes at 2,048 tokens, {late:,} at 12,288"
