"""`python apps/pocket/gpu_session.py N`: one of the three commands of a training slot on a GPU.

1 measures (smoke run), starts the data generator in the background for what the measured speed will
read, and trains; 2 trains on; 3 finishes the run and evaluates. Each stays within its seconds, so
that a slot of 30 minutes holds all three, and leaves in `--out` what must come back: shards of the
weights, the log, tables. Everything else stays in `--work`, which lasts while the machine is kept.
When it was lost, put the shards of the last command where `--shards` says and start with 2.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

ROOT: Final = Path(__file__).resolve().parents[2]
SECONDS: Final[Mapping[int, float]] = {1: 560.0, 2: 560.0, 3: 400.0}
"""Of each command, everything included."""
SMOKE_SECONDS: Final = 200.0
EVAL_SECONDS: Final = 75.0
_WIDTHS: Final = {"A": 0.5, "B": 0.25, "C": 0.12, "D": 0.13}
_ASSUMED: Final = 400_000.0
"""Tokens per second assumed where the smoke run says nothing."""
_MARGIN: Final = 1.05


@dataclass(frozen=True)
class Session:
    """Where things are, and how much time there is."""

    config: str
    work: Path
    out: Path
    corpus: Path
    tokenizer: Path
    workers: int
    scale: float
    """Factor on every time, for rehearsals."""
    shards: Path | None
    begin: float

    def left(self, command: int) -> float:
        """Seconds until the command must be done."""
        return SECONDS[command] * self.scale - (time.monotonic() - self.begin)

    @property
    def training_seconds(self) -> float:
        """What the three commands leave for training."""
        overhead = SMOKE_SECONDS + EVAL_SECONDS + 3 * 20
        return (sum(SECONDS.values()) - overhead) * self.scale

    def environment(self) -> dict[str, str]:
        """For the programs: where the code is, and where compiled code is kept between commands."""
        return {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'apps'}:{ROOT}",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "8",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        }

    def run(self, module: str, *arguments: object, timeout: float) -> bool:
        """Run a program of this package; whether it ended well within its time."""
        command = [sys.executable, "-m", module, *map(str, arguments)]
        logger.info("%.0f s: %s", time.monotonic() - self.begin, " ".join(command[1:]))
        try:
            result = subprocess.run(
                command, cwd=ROOT, env=self.environment(), timeout=max(1.0, timeout), check=False
            )
        except subprocess.TimeoutExpired:
            logger.warning("%s did not end in %.0f s", module, timeout)
            return False
        return result.returncode == 0


def measured_speeds(work: Path) -> dict[str, float]:
    """Phase -> tokens per second of the fastest variant in `smoke.json`."""
    path = work / "smoke" / "smoke.json"
    speeds: dict[str, float] = {}
    if path.exists():
        for row in json.loads(path.read_text(encoding="utf-8")):
            speed = float(row.get("tokens_per_s", 0))
            speeds[row["phase"]] = max(speed, speeds.get(row["phase"], 0))
    return speeds


def is_compiling_useful(work: Path) -> bool:
    """Whether to compile: not where that was measured to be slower, or took too long to measure."""
    if not (work / "smoke").exists():
        return True
    path = work / "smoke" / "smoke.json"
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    speed = {"off": 0.0, "auto": 0.0}
    for row in rows:
        if row["phase"] == "A":
            speed[row["compile"]] = max(speed[row["compile"]], float(row.get("tokens_per_s", 0)))
    return speed["auto"] > speed["off"]


def phase_of_shards(directory: Path | None) -> str:
    """The phase in which shards were written; A without shards."""
    for path in [] if directory is None else sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return str(header.get("__metadata__", {}).get("phase", "A"))
    return "A"


def start_generator(session: Session) -> None:
    """Write the stores of all phases in the background, sized for the measured speed.

    Long recall gets longer over a store, so a store should hold what its phase will read.
    """
    speeds = measured_speeds(session.work)
    lines = []
    first = phase_of_shards(session.shards)
    for phase, width in _WIDTHS.items():
        if phase < first:
            continue
        speed = speeds.get(phase, min(speeds.values(), default=_ASSUMED))
        tokens = max(1 << 17, round(speed * width * session.training_seconds * _MARGIN))
        lines.append(
            f"{sys.executable} -m pocket.generate --phase {phase} --corpus {session.corpus}"
            f" --tokenizer {session.tokenizer} --out {session.work}/stores/store-{phase}"
            f" --tokens {tokens} --workers {session.workers} --seed 1"
            f" --part-tokens {min(1 << 20, max(1 << 16, tokens // 4))}"
        )
    _background(session, " && ".join(lines), "generate.log")


def start_validation(session: Session) -> None:
    """Write the validation documents in the background.

    Before them the tokens of all prose, which every store begins with.
    """
    generate = (
        f"{sys.executable} -m pocket.generate --corpus {session.corpus}"
        f" --tokenizer {session.tokenizer}"
    )
    command = (
        f"{generate} --phase A --tokens 4096 --out {session.work}/stores/first"
        f" && {generate} --phase val --items 100 --out {session.work}/val"
    )
    _background(session, command, "validation.log")


def _background(session: Session, command: str, log: str) -> None:
    # A session of its own: the machine ends everything else when the command returns.
    with (session.work / log).open("w", encoding="utf-8") as handle:
        subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            env=session.environment(),
            stdout=handle,
            stderr=handle,
            start_new_session=True,
        )


def train(session: Session, command: int, seconds: float) -> None:
    """Train for so many seconds, from where the run is."""
    arguments: list[object] = [
        *("--config", session.config, "--store-dir", session.work / "stores"),
        *("--out", session.work / "run", "--until", round(seconds, 1)),
        *("--shards", session.out),
        *("--compile", "auto" if is_compiling_useful(session.work) else "off"),
    ]
    if command < 3:
        arguments += ["--whole", round(session.training_seconds, 1)]
    if (session.work / "run" / "state.pt").exists():
        arguments += ["--resume", session.work / "run"]
    elif session.shards is not None:
        arguments += ["--resume", session.shards]
    if not session.run("pocket.train", *arguments, timeout=seconds + 20 * session.scale + 5):
        logger.error("training did not end well; the last state is at most two minutes old")


def evaluate(session: Session, name: str, seconds: float, *arguments: object) -> None:
    """Judge the run's weights."""
    session.run(
        "pocket.quick_eval",
        session.work / "run",
        *("--config", session.config, "--validation", session.work / "val"),
        *("--tokenizer", session.tokenizer, "--out", session.out / name),
        *("--until", round(seconds, 1), "--quantised", *arguments),
        timeout=seconds + 20,
    )


def first_command(session: Session) -> None:
    """Measure, start the generator, train."""
    shutil.rmtree(session.work, ignore_errors=True)
    (session.work / "smoke").mkdir(parents=True)
    start_validation(session)
    session.run(
        "pocket.train",
        *("--smoke", "--config", session.config, "--store-dir", session.work / "stores"),
        *("--out", session.work / "smoke", "--steps", 10),
        timeout=SMOKE_SECONDS * session.scale,
    )
    start_generator(session)
    train(session, 1, session.left(1) - 12 * session.scale)


def last_command(session: Session) -> None:
    """Finish the run, judge it."""
    spare = (EVAL_SECONDS + 15) * session.scale
    train(session, 3, session.left(3) - spare)
    evaluate(session, "eval.json", EVAL_SECONDS * session.scale * 0.7)
    evaluate(
        session,
        "eval-random.json",
        max(5.0, session.left(3) - 8 * session.scale),
        *("--selection", "random", "--per-set", 40, "--sets", "recall-L"),
    )


def copy_results(session: Session) -> None:
    """What must come back beside the shards, small files."""
    found: list[Path] = [session.work / "run" / "train_log.jsonl"]
    found += [session.work / "smoke" / name for name in ("smoke.json", "profile.txt")]
    for path in found:
        if path.exists():
            shutil.copy(path, session.out / path.name)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s session: %(message)s")
    args = _parser().parse_args(arguments)
    session = Session(
        config=args.config,
        work=args.work,
        out=args.out,
        corpus=args.corpus,
        tokenizer=args.tokenizer,
        workers=args.workers,
        scale=args.scale,
        shards=args.shards,
        begin=time.monotonic(),
    )
    session.out.mkdir(parents=True, exist_ok=True)
    if args.command == 1:
        first_command(session)
    else:
        _restore(session)
        if args.command == 2:
            train(session, 2, session.left(2) - 8 * session.scale)
        else:
            last_command(session)
    copy_results(session)
    for path in sorted(session.out.iterdir()):
        logger.info("%s: %.2f MiB", path.name, path.stat().st_size / (1 << 20))
    logger.info("%.0f s in all", time.monotonic() - session.begin)
    return 0


def _restore(session: Session) -> None:
    """On a new machine: validation documents and stores again."""
    if (session.work / "run").exists():
        return
    session.work.mkdir(parents=True, exist_ok=True)
    start_validation(session)
    start_generator(session)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_session", description=__doc__)
    add: Any = parser.add_argument
    add("command", type=int, choices=[1, 2, 3])
    add("--out", type=Path, required=True, help="what must come back")
    add("--work", type=Path, default=Path("/tmp/pocket-run"))
    add("--config", default="pocket-v4")
    add("--corpus", type=Path, default=ROOT / "apps/pocket/build/corpus.tar.xz")
    add("--tokenizer", type=Path, default=ROOT / "apps/pocket/data/tokenizer.json")
    add("--workers", type=int, default=13, help="processes of the generator")
    add("--scale", type=float, default=1.0, help="factor on every time, for rehearsals")
    add("--shards", type=Path, help="resume from these when the machine is new")
    return parser


if __name__ == "__main__":
    sys.exit(main())
