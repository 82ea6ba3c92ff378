"""Time to open a header with DeepSeek-V4's vocabulary: 129,280 tokens and 127,741 merges."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path

import harness
import numpy as np
from harness import Figure

from edgedsv4.formats.gguf import GgufType, read_gguf
from edgedsv4.formats.gguf_write import GgufWriter

TOKENS = 129_280
MERGES = 127_741


def write_vocabulary(path: Path) -> tuple[list[str], list[str]]:
    """Write a header whose strings have the lengths of a byte-level vocabulary."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyzĠÃ¤çļ"

    def word() -> str:
        return "".join(draw.choices(letters, k=draw.randint(1, 11)))

    tokens = [f"{word()}{n:x}" for n in range(TOKENS)]
    merges = [f"{word()} {word()}" for _ in range(MERGES)]
    writer = GgufWriter(path)
    writer.add_metadata("general.architecture", "deepseek4", GgufType.STRING)
    writer.add_metadata("tokenizer.ggml.tokens", tokens, GgufType.STRING)
    writer.add_metadata("tokenizer.ggml.token_type", np.ones(TOKENS, np.int32), GgufType.I32)
    writer.add_metadata("tokenizer.ggml.merges", merges, GgufType.STRING)
    writer.write()
    return tokens, merges


def measure(repeats: int) -> list[Figure]:
    """CPU time of one opening: a wall clock would also time what else the machine does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        tokens, merges = write_vocabulary(path)
        readings = []
        for _ in range(repeats):
            start = time.process_time()
            opened = read_gguf(path)
            readings.append(time.process_time() - start)
            if opened.metadata["tokenizer.ggml.tokens"] != tokens:
                raise SystemExit("wrong tokens: no time is reported")
            if opened.metadata["tokenizer.ggml.merges"] != merges:
                raise SystemExit("wrong merges: no time is reported")
            opened.close()
        size = path.stat().st_size
    median = statistics.median(readings)
    return [
        Figure("header", "257,021 strings opened", 1e3 * median, "ms of CPU", repeats),
        Figure("header", "rate", size / median / 1e6, "MB/s", repeats),
    ]


if __name__ == "__main__":
    harness.main(measure)
