"""Coverage-guided fuzzing of the readers of route traces and frequency files.

By hand, from the root of the repository (finds are kept in the first folder):
    python tests/fuzz/fuzz_expert_routes.py /tmp/routes-work tests/fuzz/corpus/expert_routes \\
        -max_total_time=180
The seeds are written again by:
    python tests/fuzz/fuzz_expert_routes.py --write-corpus tests/fuzz/corpus/expert_routes
"""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADER = 96


def sealed(content: bytes) -> bytes:
    """A trace with checksums that fit, so that a mutation comes to what is behind them."""
    data = bytearray(content)
    if len(data) >= HEADER:
        struct.pack_into("<I", data, 80, zlib.crc32(data[HEADER:]))
        struct.pack_into("<I", data, 84, zlib.crc32(data[:84]))
    return bytes(data)


def check_one(content: bytes, folder: Path) -> bool:
    """Read `content` as a frequency file or as a trace; only success or `FormatError`.

    Returns:
        whether it was read.
    """
    # Imported here: `main` instruments the package first.
    from edgedsv4.errors import FormatError
    from edgedsv4.formats.expert_frequency import read_expert_frequency
    from edgedsv4.formats.route_trace import NO_GUESS, read_route_trace

    path, is_json = folder / "x", content[:1] == b"{"
    path.write_bytes(content if is_json else sealed(content))
    try:
        if is_json:
            frequency = read_expert_frequency(path)
            layers, experts = frequency.counts.shape
            if frequency.pairs is not None:
                for layer in range(layers):
                    found = frequency.pairs.likeliest(layer, range(experts), 64)
                    if not all(0 <= expert < experts for expert in found):
                        raise AssertionError("a guess is no expert")
            return True
        trace = read_route_trace(path)
    except FormatError as error:
        if error.path is None or (error.offset is not None and error.offset > len(content)):
            raise AssertionError(f"misplaced: {error}") from error
        return False
    shape = trace.shape
    if trace.ids.max() >= shape.experts or trace.ids.shape[0] != [*trace.spans()][-1][1]:
        raise AssertionError("an id is no expert, or the runs do not cover the tokens")
    if trace.guesses is not None:
        guesses = trace.guesses[trace.guesses != NO_GUESS]
        if guesses.size and guesses.max() >= shape.experts:
            raise AssertionError("a guess is no expert")
    return True


def write_corpus(folder: Path) -> None:
    """Write the seeds: small files that together visit every branch a valid file takes."""
    import numpy as np

    from edgedsv4.formats.expert_frequency import ExpertFrequency, write_expert_frequency
    from edgedsv4.formats.next_pairs import PairCounter
    from edgedsv4.formats.route_trace import RouteShape, write_route_trace

    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    ids = draw.permuted(np.tile(np.arange(6), (5, 3, 1)), axis=2)
    guesses = draw.integers(6, size=(5, 3, 2))
    guesses[:, 0] = -1
    for name, extra in (("plain", None), ("guesses", guesses)):
        with write_route_trace(folder / f"{name}.routes", RouteShape(3, 6, 2)) as writer:
            for kind, rows in (("prefill", slice(0, 3)), ("decode", slice(3, 5))):
                own = None if extra is None else extra[rows]
                writer.append(ids[rows, :, :2], kind, guesses=own)
    counts = np.array([np.bincount(ids[:, n, :2].ravel(), minlength=6) for n in range(3)])
    counter = PairCounter(3, 6)
    counter.add(ids[:, :, :2])
    counts = counts.astype(np.uint64)
    for name, pairs in (("plain", None), ("pairs", counter.pairs(2, counts))):
        frequency = ExpertFrequency("ab" * 32, "text", "cd" * 32, 5, 2, counts, pairs)
        write_expert_frequency(folder / f"{name}.json", frequency)


def main(arguments: list[str]) -> None:
    """Fuzz until libFuzzer's own options say stop."""
    import atheris
    from file_fuzzing import fuzz_files

    with atheris.instrument_imports(include=["edgedsv4.formats"]):
        import edgedsv4.formats.expert_frequency
        import edgedsv4.formats.route_trace
    assert edgedsv4.formats.route_trace is not None
    fuzz_files(arguments, check_one, longest=4096)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:2] == ["--write-corpus"]:
        write_corpus(Path(sys.argv[2]))
    else:
        main(sys.argv)
