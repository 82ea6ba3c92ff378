"""GGUF files that claim much: memory stays below the file and 64 MiB, and the answer is quick."""

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf_bytes as gb
import pytest
from fresh_process import FRESH
from gguf_refusal import with_pair

from edgedsv4.errors import FormatError
from edgedsv4.formats.gguf import read_gguf

ROOT = Path(__file__).resolve().parents[3]


def filled(kind: int, element: bytes, nbytes: int) -> gb.Gguf:
    payload = gb.array(kind, [element * (nbytes // len(element))], count=nbytes // len(element))
    return with_pair(gb.pair("a", gb.ARRAY, payload))


def long_then_empty_strings() -> gb.Gguf:
    strings = [gb.string("a" * 11_500_000), *[gb.string("")] * 100_000]
    return with_pair(gb.pair("a", gb.ARRAY, gb.array(gb.STRING, strings)))


def many_keys() -> gb.Gguf:
    return with_pair(*[gb.pair(f"{n:x}", gb.U8, 1) for n in range(200_000)])


def many_tensors() -> gb.Gguf:
    return gb.Gguf(tensors=[gb.tensor(f"{n:x}", (1,)) for n in range(80_000)])


MB = 1 << 20
GREEDY = {
    "empty_strings": lambda: filled(gb.STRING, gb.string(""), 8 * MB),
    "short_strings": lambda: filled(gb.STRING, gb.string("ab"), 12 * MB),
    "wide_strings": lambda: filled(gb.STRING, gb.string("a" * 90 + "🌕"), 8 * MB),
    "one_wide_character": lambda: with_pair(gb.pair("a", gb.STRING, "a" * 12 * MB + "🌕")),
    "long_string_then_empty_ones": long_then_empty_strings,
    "empty_arrays": lambda: filled(gb.ARRAY, gb.array(gb.U8, []), 2 * MB),
    "keys": many_keys,
    "tensors": many_tensors,
}


@pytest.mark.parametrize("make", GREEDY.values(), ids=GREEDY)
def test_memory_stays_below_the_file_and_64_mib(
    tmp_path: Path, make: Callable[[], gb.Gguf]
) -> None:
    path = make().write(tmp_path / "a.gguf")
    limit = path.stat().st_size + 64 * MB
    refused = ""
    tracemalloc.start()
    try:
        try:
            read_gguf(path).close()
        except FormatError as error:
            refused = str(error)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit
    assert refused == "" or "more memory than a header may take" in refused


def test_sparse_terabyte_of_strings_is_refused_at_once(tmp_path: Path) -> None:
    body = """
import os, resource, sys
from pathlib import Path
from edgedsv4.errors import FormatError
from edgedsv4.formats.gguf import read_gguf

path = Path(sys.argv[1])
os.truncate(path, 1 << 38)
try:
    read_gguf(path)
except FormatError as error:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 600 << 10, error)
"""
    count = (1 << 38) // 8 - 1000
    made = with_pair(gb.pair("a", gb.ARRAY, gb.array(gb.STRING, [], count=count)))
    path = made.write(tmp_path / "a.gguf")
    done = subprocess.run(
        [*FRESH, sys.executable, "-c", body, str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("True")
    assert "more memory than a header may take" in done.stdout
