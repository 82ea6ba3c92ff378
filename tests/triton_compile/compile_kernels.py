"""Compile every variant of every kernel for every target, and keep what they take.

`make compile-kernels` runs this. It compiles what the stored table lacks, drops what nothing
launches any more, prints the table and fails if a kernel takes too much. With another Triton than
the one that tests are pinned to (`make compile-kernels TRITON=3.9.0`) everything is compiled and
nothing stored.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "triton"), str(HERE.parent)]

import triton  # noqa: E402
from resource_table import ResourceTable, read_table, write_table  # noqa: E402
from resources import Resources, compile_launch, resources  # noqa: E402
from variants import variants  # noqa: E402

from edgedsv4.kernels.gpu.targets import TARGETS  # noqa: E402

PINNED = next(
    line.removeprefix("triton==").strip()
    for line in (HERE.parents[1] / "constraints.txt").read_text().splitlines()
    if line.startswith("triton==")
)
SAVE_SECONDS = 20

Missing = list[tuple[str, str]]
"""Pairs of target and digest."""


def main() -> int:
    """Compile, store, print; the exit status."""
    options = _parse()
    targets = options.targets.split(",") if options.targets else list(TARGETS)
    wanted = [pair for target in targets for pair in _chosen(target, options.only)]
    table, is_stored = read_table(), triton.__version__ == PINNED
    if table.triton != triton.__version__:
        table = ResourceTable(triton.__version__)
    if is_stored and not options.only and not options.targets:
        _drop_stale(table, wanted)
    missing = [pair for pair in wanted if options.all or pair not in table.figures]
    print(f"Triton {triton.__version__}: {len(wanted)} variants, {len(missing)} to compile")
    errors = _compile(missing, table, options.jobs, is_stored)
    if not options.quiet:
        print("\n".join(_lines(table, wanted)))
    faults = [*errors, *_faults(table, wanted)]
    print("\n".join(faults) if faults else "every variant fits")
    return 1 if faults else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--targets", help="sm_90,gfx942; all by default")
    parser.add_argument("--only", default="", help="kernels or cases with this in their name")
    parser.add_argument("--all", action="store_true", help="compile what is stored, too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--quiet", action="store_true", help="do not print the table")
    return parser.parse_args()


def _chosen(target: str, word: str) -> Iterator[tuple[str, str]]:
    for digest, variant in variants(target).items():
        if any(word in name for name in (variant.launch.name, *variant.cases)):
            yield target, digest


def _drop_stale(table: ResourceTable, wanted: Missing) -> None:
    for pair in table.figures.keys() - set(wanted):
        del table.figures[pair]


def _compile(missing: Missing, table: ResourceTable, jobs: int, is_stored: bool) -> list[str]:
    """Fill the table, in processes of their own; what could not be compiled."""
    errors, saved = [], time.monotonic()
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(max(1, jobs), context, _start, (folder,)) as pool,
    ):
        # The targets of one variant one after another, so that a process compiles them all.
        futures = {pool.submit(_resources_of, *pair): pair for pair in missing}
        for count, future in enumerate(as_completed(futures), 1):
            target, digest = futures[future]
            launch = variants(target)[digest].launch
            error = _keep(table, future, (target, digest, launch.name))
            print(f"[{count}/{len(missing)}] {launch.name} {target} {error or ''}", flush=True)
            errors += [error] if error else []
            if is_stored and time.monotonic() - saved > SAVE_SECONDS:
                write_table(table)
                saved = time.monotonic()
    if is_stored:
        write_table(table)
    return errors


def _keep(
    table: ResourceTable, future: Future[Resources], variant: tuple[str, str, str]
) -> str | None:
    target, digest, name = variant
    error = future.exception()
    if error is None:
        table.put(target, digest, name, future.result())
        return None
    cases = ", ".join(variants(target)[digest].cases)
    return f"{name} {target} ({cases}): {str(error)[-2000:]}"


def _start(folder: str) -> None:
    """In a compiling process: a cache that goes with the run."""
    triton.knobs.cache.dir = folder


def _resources_of(target: str, digest: str) -> Resources:
    """Figures of a variant; an error of the innermost kernel, since causes stay in this process."""
    try:
        return resources(compile_launch(variants(target)[digest].launch))
    except Exception as error:  # noqa: BLE001  # whatever it is, it is this variant's
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise RuntimeError(f"{type(cause).__name__}: {cause}") from None


def _lines(table: ResourceTable, wanted: Missing) -> Iterator[str]:
    yield f"{'kernel':32} {'target':8} {'shared':>7} {'regs':>5} {'spills':>6}  cases"
    for target, digest in sorted(wanted, key=lambda p: (table.names.get(p[1], ""), p[1], p[0])):
        taken = table.figures.get((target, digest))
        if taken is None:
            continue
        variant = variants(target)[digest]
        figures = f"{taken.shared:7} {taken.registers:5} {taken.spilled:6}"
        yield f"{variant.launch.name:32} {target:8} {figures}  {', '.join(variant.cases)}"


def _faults(table: ResourceTable, wanted: Missing) -> Iterator[str]:
    for target, digest in wanted:
        taken = table.figures.get((target, digest))
        for fault in taken.faults(target) if taken else ():
            variant = variants(target)[digest]
            yield f"{variant.launch.name} {target} ({', '.join(variant.cases)}): {fault}"


if __name__ == "__main__":
    sys.exit(main())
