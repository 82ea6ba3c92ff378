"""`python -m pocket.evaluate`: the table of what a pocket model can do, through the runtime.

Chat tasks are decoded greedily, likelihoods and long recall are judged with the true tokens given.
Sets are shared among processes of one thread each; at the time limit the table holds what was done.
Without a corpus archive the figures that need one are left out, and filler is made of stories.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from edgedsv4.errors import Dsv4Error
from pocket.eval_tasks import TASKS, Row, Setting, Task, selected

logger = logging.getLogger(__name__)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def commit() -> str:
    """The commit of this checkout, `+changes` when its tracked files differ; empty without git."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    folder = Path(__file__).parent
    try:
        found = subprocess.run(command, cwd=folder, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        logger.info("no commit to name: %s", error)
        return ""
    return found.stdout.strip()


def run_task(task: Task, setting: Setting) -> tuple[list[Row], float]:
    """The rows of one task and its seconds; the body of a worker process."""
    start = time.monotonic()
    rows = task.run(setting)
    return rows, time.monotonic() - start


def results(
    tasks: Sequence[Task], setting: Setting, workers: int
) -> Iterator[tuple[Task, list[Row], float]]:
    """Tasks with their rows and seconds as they finish."""
    if workers == 1:
        for task in tasks:
            yield task, *run_task(task, setting)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs = {pool.submit(run_task, task, setting): task for task in tasks}
        for job in as_completed(jobs):
            yield jobs[job], *job.result()


def table(tasks: Sequence[Task], setting: Setting, workers: int) -> dict[str, object]:
    """Everything that is written, in the order of the tasks."""
    done: dict[str, list[Row]] = {}
    seconds: dict[str, float] = {}
    for task, rows, taken in results(tasks, setting, workers):
        done[task.label], seconds[task.label] = rows, round(taken, 1)
        for row in rows:
            logger.info("%-28s %-44s %9.4f  n %d", row.name, row.measure, row.value, row.n)
    files = [path for path in (setting.model, setting.draft) if path and path.is_file()]
    return {
        "commit": commit(),
        "sha256": {path.name: file_sha256(path) for path in files},
        "has_corpus": setting.corpus is not None,
        "items": setting.items,
        "rows": [row.to_json() for task in tasks for row in done[task.label]],
        "left_out": [task.label for task in tasks if not done[task.label]],
        "seconds": seconds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("edgedsv4").setLevel(logging.WARNING)
    args = _parser().parse_args(arguments)
    draft = args.draft or args.model.with_name(f"mtp-{args.model.name}")
    setting = Setting(
        model=args.model,
        draft=draft if args.draft or draft.exists() else None,
        corpus=args.corpus,
        items=args.items,
    )
    if args.until is not None:
        setting = replace(setting, deadline=time.time() + args.until)
    try:
        found = table(selected(args.sets.split(",") if args.sets else []), setting, args.workers)
    except Dsv4Error as error:
        logger.error("%s", error)
        return 2
    text = json.dumps(found, indent=1) + "\n"
    if args.out is None:
        sys.stdout.write(text)
    else:
        args.out.write_text(text, encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    labels = ", ".join(dict.fromkeys(task.label.split(":")[0] for task in TASKS))
    parser = argparse.ArgumentParser(prog="python -m pocket.evaluate", description=__doc__)
    parser.add_argument("model", type=Path, help="GGUF file or official directory")
    parser.add_argument("--draft", type=Path, help="its MTP block; else mtp-NAME beside it")
    parser.add_argument("--corpus", type=Path, help="archive of pocket.corpus")
    parser.add_argument("--items", type=int, default=100, help="documents of a cheap figure")
    parser.add_argument(
        "--sets", default="", help=f"names or beginnings of names, with commas; kinds: {labels}"
    )
    parser.add_argument("--until", type=float, help="seconds after which nothing new is begun")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="JSON file; else standard output")
    return parser


if __name__ == "__main__":
    sys.exit(main())
