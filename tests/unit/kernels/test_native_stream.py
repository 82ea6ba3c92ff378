"""The measuring loop reads every word once, whatever the number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from edgedsv4.kernels.native.library import library, new_run


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("words", [0, 1, (1 << 20) - 1, (1 << 21) + 3])
def test_sum_is_that_of_all_words(words: int, threads: int) -> None:
    lib, ffi = library()
    data = np.random.default_rng(words).integers(0, 1 << 63, words, dtype=np.uint64)
    total = ffi.new("uint64_t *", 7)
    run = new_run(threads)
    run.check(lib.dk_stream_sum(run.cdata, total, ffi.cast("uint64_t *", data.ctypes.data), words))
    assert total[0] == int(data.sum(dtype=np.uint64))
