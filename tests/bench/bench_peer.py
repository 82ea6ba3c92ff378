"""llama.cpp and edgedsv4 on the same file, with the same threads, in turns.

llama.cpp comes from the `llama_cpp` package (`pip install llama-cpp-python`), in this interpreter
or in one that `--peer-python` names. It gets its best flags: every variant below is tried, and the
best one for prefill and the best one for decode are measured beside ours. Where an earlier figure
of the peer is known and larger than what it reaches here, the ratio is against that one.

    python tests/bench/bench_peer.py --peer-python PEER/bin/python [--experts mxfp4,q4_k] [--record]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
import numpy.typing as npt
from harness import Figure
from mid_model import DEFAULT_FOLDER, EXPERT_TYPES, mid_model

from edgedsv4 import Engine, EngineOptions, Session

WORKER = Path(__file__).with_name("peer_worker.py")
VARIANTS: dict[str, dict[str, Any]] = {
    "repacked, flash attention": {"load": "read", "repack": True, "flash": 1},
    "mapped, flash attention": {"load": "mmap", "repack": False, "flash": 1},
    "repacked, no flash attention": {"load": "read", "repack": True, "flash": 0},
    "repacked, flash attention, batch 256": {
        "load": "read",
        "repack": True,
        "flash": 1,
        "batch": 256,
    },
}
"""Flags of llama.cpp that change its speed on a CPU; all use `threads` for batches as well."""
KNOWN = {
    "mid-mxfp4": {"prefill": 70.0, "decode": 14.0},
    "mid-q4_k": {"prefill": 82.0, "decode": 15.5},
}
"""Tokens per second that llama.cpp reached with these files on a quiet 2-core machine."""
SAME_LOGITS = 0.7
"""Least cosine of both logits. Both round activations, and a random model turns small differences
into other experts: 0.87 to 0.99 was seen, different weights give 0."""
Work = Callable[[], float]


@dataclass(frozen=True)
class Setup:
    """What is compared."""

    model: str = "random-tiny"
    peer_python: str | None = None
    threads: int = 1
    prompt: int = 16
    generate: int = 4
    depth: int = 0
    chunk: int = 512
    backend: str = "auto"

    @property
    def context(self) -> int:
        """Tokens both must hold."""
        needed = max(1, self.depth) + self.generate + self.prompt
        return -(-needed // 256) * 256


class Peer:
    """llama.cpp in a process of its own."""

    def __init__(self, setup: Setup, variant: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [setup.peer_python or sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        order = {"model": setup.model, "context": setup.context, "batch": setup.chunk}
        self.about = self._ask(order | {"threads": setup.threads} | variant)

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def prefill(self, ids: Sequence[int]) -> float:
        return float(self._ask({"prompt": ids, "decode": []})["prefill"])

    def decode(self, prefix: Sequence[int], ids: Sequence[int]) -> float:
        return float(self._ask({"prompt": prefix, "decode": ids})["decode"])

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float64]:
        answer = self._ask({"prompt": ids, "decode": [], "logits": True})
        return np.array(answer["logits"], dtype=np.float64)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


class Ours:
    """edgedsv4 in this process."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def prefill(self, ids: Sequence[int]) -> float:
        self._session.sync([])
        start = time.perf_counter()
        self._session.evaluate(ids)
        return time.perf_counter() - start

    def decode(self, prefix: Sequence[int], ids: Sequence[int]) -> float:
        self._session.sync(prefix)
        start = time.perf_counter()
        for token_id in ids:
            self._session.evaluate([token_id])
        return time.perf_counter() - start

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float64]:
        self._session.sync(ids)
        return self._session.logits().astype(np.float64)


def compare(setup: Setup, repeats: int, say: Callable[[str], None]) -> list[Figure]:
    """Measure both; only ours when there is no peer."""
    options = EngineOptions(
        threads=setup.threads,
        context=setup.context,
        prefill_chunk=setup.chunk,
        backend=setup.backend,  # type: ignore[arg-type]  # judged by the record
    )
    with ExitStack() as stack:
        engine = stack.enter_context(Engine.open(setup.model, options))
        ours = Ours(stack.enter_context(engine.new_session()))
        draw = np.random.default_rng(1)
        ids = draw.integers(engine.config.vocab_size, size=setup.context).tolist()
        say(f"ours: {_kernels(engine)}, {setup.threads} threads, chunk {setup.chunk}")
        peers: dict[str, Peer] = {}
        if has_peer(setup.peer_python):
            peers = stack.enter_context(best_peers(setup, ids, say))
            _check(ours, peers["decode"], ids)
        seconds = _in_turns(_jobs(setup, ours, peers, ids), repeats)
        return _figures(setup, engine, seconds, repeats)


def _kernels(engine: Engine) -> str:
    kernels = engine.describe()["kernels"]
    return ", ".join(sorted(set(kernels.values()))) if isinstance(kernels, dict) else "unknown"


def has_peer(python: str | None) -> bool:
    """Whether the interpreter has llama.cpp; an error when it was named and has not."""
    check = "import importlib.util as u; raise SystemExit(u.find_spec('llama_cpp') is None)"
    found = subprocess.run([python or sys.executable, "-c", check], check=False).returncode == 0
    if python and not found:
        raise SystemExit(f"{python} has no package llama_cpp")
    return found


@contextmanager
def best_peers(
    setup: Setup, ids: list[int], say: Callable[[str], None]
) -> Iterator[dict[str, Peer]]:
    """The best variant for prefill and for decode, each as an opened peer."""
    best: dict[str, tuple[float, str]] = {}
    for name, variant in VARIANTS.items():
        peer = Peer(setup, variant)
        jobs = _peer_jobs(setup, {"prefill": peer, "decode": peer}, ids)
        found = {work: min(job() for _ in range(2)) for work, job in jobs.items()}
        rates = {work: _tokens(setup, work) / seconds for work, seconds in found.items()}
        say(f"peer, {name}: " + ", ".join(f"{work} {rate:.1f}" for work, rate in rates.items()))
        for work, rate in rates.items():
            best[work] = max(best.get(work, (0.0, "")), (rate, name))
        peer.close()
    opened = {name: Peer(setup, VARIANTS[name]) for name in {name for _, name in best.values()}}
    for work, (_, name) in best.items():
        say(f"peer for {work}: {name}, {setup.threads} threads")
    about = next(iter(opened.values())).about
    say(f"peer: llama-cpp-python {about['version']}: {about['system']}")
    try:
        yield {work: opened[name] for work, (_, name) in best.items()}
    finally:
        for peer in opened.values():
            peer.close()


def _check(ours: Ours, peer: Peer, ids: list[int]) -> None:
    """Refuse to time two models that do not say the same."""
    mine, theirs = ours.logits(ids[:2]), peer.logits(ids[:2])
    cosine = float(mine @ theirs / np.linalg.norm(mine) / np.linalg.norm(theirs))
    if not cosine > SAME_LOGITS:
        raise SystemExit(f"logits differ (cosine {cosine:.3f}): no time is reported")


def _jobs(setup: Setup, ours: Ours, peers: dict[str, Peer], ids: list[int]) -> dict[str, Work]:
    prefix, following = _decode_ids(setup, ids)
    jobs: dict[str, Work] = {
        "prefill": lambda: ours.prefill(ids[: setup.prompt]),
        "decode": lambda: ours.decode(prefix, following),
    }
    return jobs | {f"peer {work}": job for work, job in _peer_jobs(setup, peers, ids).items()}


def _peer_jobs(setup: Setup, peers: dict[str, Peer], ids: list[int]) -> dict[str, Work]:
    prefix, following = _decode_ids(setup, ids)
    if not peers:
        return {}
    return {
        "prefill": lambda: peers["prefill"].prefill(ids[: setup.prompt]),
        "decode": lambda: peers["decode"].decode(prefix, following),
    }


def _decode_ids(setup: Setup, ids: list[int]) -> tuple[list[int], list[int]]:
    start = max(1, setup.depth)
    return ids[:start], ids[start : start + setup.generate]


def _in_turns(jobs: dict[str, Work], repeats: int) -> dict[str, float]:
    """Median seconds of each job; the first round does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats + 1):
        for name, job in jobs.items():
            seconds[name].append(job())
    return {name: statistics.median(readings[1:]) for name, readings in seconds.items()}


def _tokens(setup: Setup, work: str) -> int:
    return setup.prompt if work.endswith("prefill") else setup.generate


def _figures(setup: Setup, engine: Engine, seconds: dict[str, float], repeats: int) -> list[Figure]:
    name = Path(setup.model).stem
    rates = {work: _tokens(setup, work) / found for work, found in seconds.items()}

    def figure(what: str, value: float, unit: str, n: int = repeats) -> Figure:
        return Figure("peer", f"{name}, {setup.threads} threads: {what}", value, unit, n)

    figures = [figure(work, rate, "tokens/s") for work, rate in rates.items()]
    middle = max(1, setup.depth) + setup.generate // 2
    bytes_per_token = sum(engine.bytes_per_token(middle).values())
    stream = harness.read_rate(setup.threads, 1 << 30)
    figures.append(figure("memory reads", stream / 1e9, "GB/s", 5))
    figures += [
        figure(f"share of the reads, {work}", rate * bytes_per_token / stream, "of bytes per token")
        for work, rate in rates.items()
        if work.endswith("decode")
    ]
    for work in ("prefill", "decode"):
        if f"peer {work}" in rates:
            against = max(rates[f"peer {work}"], KNOWN.get(name, {}).get(work, 0.0))
            figures.append(figure(f"{work} ratio", rates[work] / against, "times the peer"))
    return figures


def measure(repeats: int) -> list[Figure]:
    """A short run of our side on a tiny model, so that this file does not rot."""
    return compare(Setup(), repeats, lambda _: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a GGUF file instead of the mid models")
    parser.add_argument("--experts", default="mxfp4,q4_k", help="of the mid models, made if absent")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="of the mid models")
    parser.add_argument("--peer-python", help="interpreter that has the llama_cpp package")
    parser.add_argument("--backend", default="auto", help="of ours")
    for name, value in (("threads", 2), ("prompt", 512), ("generate", 64), ("depth", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--chunk", type=int, default=512, help="tokens at once, both sides")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="add to results/<machine>.csv")
    given = parser.parse_args()
    names = [] if given.model else given.experts.split(",")
    if unknown := set(names) - set(EXPERT_TYPES):
        parser.error(f"--experts must be of {', '.join(EXPERT_TYPES)}, found {', '.join(unknown)}")
    models = [given.model] if given.model else [mid_model(given.folder, name) for name in names]
    common = ("peer_python", "threads", "prompt", "generate", "depth", "chunk", "backend")
    for model in models:
        setup = Setup(model=str(model), **{name: getattr(given, name) for name in common})
        harness.show(compare(setup, given.repeats, print), is_recorded=given.record)


if __name__ == "__main__":
    main()
