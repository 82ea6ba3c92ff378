"""Products of many tokens at the two best instruction sets of this machine: what the last gains.

The levels take turns, and rates are the best of n, because other programs only ever take time away.
"""

from __future__ import annotations

from collections.abc import Iterator

import harness
from bench_quant_matmul import ONE, Work, activations, stored
from harness import Figure

from edgedsv4.kernels.native.library import library

TYPES = ("Q8_0", "MXFP4", "Q4_K", "Q2_K", "IQ2_XXS")
TOKENS = (32, 64, 256)


def levels() -> dict[int, str]:
    """Names of the two best instruction sets that this machine has."""
    lib, ffi = library()
    best = lib.dk_isa()
    found = [level for level in range(16) if lib.dk_set_isa(level) == 0]
    lib.dk_set_isa(best)
    return {level: ffi.string(lib.dk_isa_name(level)).decode() for level in found[-2:]}


def measure(repeats: int) -> list[Figure]:
    """Operations per second by type, tokens, threads and level."""
    return [figure for name in TYPES for figure in _of_type(name, repeats)]


def _of_type(name: str, repeats: int) -> Iterator[Figure]:
    lib, _ = library()
    best, weight = lib.dk_isa(), stored(name, ONE)
    for tokens in TOKENS:
        work = Work(weight, ONE, activations(tokens))
        for threads in (1, 2):
            seconds = dict.fromkeys(levels(), float("inf"))
            for turn in range(repeats + 1):
                for level in seconds:
                    lib.dk_set_isa(level)
                    took = harness.once(lambda: work.call(threads))  # noqa: B023
                    if turn == 0:
                        work.check()
                    else:
                        seconds[level] = min(seconds[level], took)
            lib.dk_set_isa(best)
            for level, level_name in levels().items():
                rate = 2 * ONE.elements * tokens / seconds[level] / 1e9
                label = f"{name} int8 {ONE}, {tokens} tokens, {threads} threads, {level_name}"
                yield Figure("levels", label, rate, "GFLOP/s", repeats)


if __name__ == "__main__":
    harness.main(measure)
