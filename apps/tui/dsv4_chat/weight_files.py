"""Reading a model's files once, from front to back, before the first reply.

The engine maps its files, so their bytes come in when a reply first needs them, page by page and
in no order. Read here they come at the speed of the disk, with a progress that can be shown.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from dsv4_chat.chat_model import OnProgress, Progress

CHUNK_BYTES = 8 << 20
_REPORT_SECONDS = 0.05
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def weight_files(path: Path) -> list[Path]:
    """The files of a model: a GGUF file, all parts of a split one, or those of a checkpoint."""
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    part = _PART.search(path.name)
    if part is None:
        return [path]
    stem, count = path.name[: part.start()], path.name[part.end() - len("00000.gguf") :]
    return sorted(path.parent.glob(f"{stem}-?????-of-{count}"))


def read_weights(
    paths: list[Path],
    on_progress: OnProgress,
    check: Callable[[], None],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Read files into the system's cache.

    Args:
        paths: files to read.
        on_progress: told of the bytes, a few times a second.
        check: called after each chunk of some milliseconds; raises to stop.
        clock: seconds.

    Returns:
        Bytes read.

    Raises:
        OSError: a file cannot be read.
    """
    total = sum(path.stat().st_size for path in paths)
    buffer = bytearray(CHUNK_BYTES)
    began = reported = clock()
    done = 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                done += count
                check()
                now = clock()
                if now - reported >= _REPORT_SECONDS:
                    reported = now
                    on_progress(_progress(done, total, now - began))
    on_progress(_progress(done, total, clock() - began))
    return done


def _progress(done: int, total: int, seconds: float) -> Progress:
    return Progress(
        phase="read weights",
        done=done,
        total=total,
        bytes_per_second=done / seconds if seconds > 0 else None,
        unit="bytes",
    )
