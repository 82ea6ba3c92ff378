"""`python -m pocket.generate`: write the token store of a phase, or the validation documents.

A store is a folder of parts (`part-00000.bin`, …): little-endian uint16, one per token, the id in
bits 0..11 and bit 15 set on loss targets. `meta.json` is written first, each part appears under its
name when it is complete, `DONE` closes the store; so a trainer can read while this runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgedsv4.errors import ConfigError
from edgedsv4.text.tokenizer import Tokenizer
from pocket.corpus import Corpus, load_corpus
from pocket.documents import TextEncoder
from pocket.mixtures import PHASES, Phase
from pocket.natural import NaturalTokens, training_corpus
from pocket.part_maker import PartMaker
from pocket.validation import validation_items
from pocket.validation_file import write_items

logger = logging.getLogger(__name__)

PART_TOKENS = 1 << 20
_SUFFIXES = {"K": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    """What a store will hold."""

    phase: Phase
    seed: int
    parts: int
    part_tokens: int

    @classmethod
    def of(
        cls, phase: Phase, *, tokens: int, seed: int, part_tokens: int = PART_TOKENS
    ) -> StorePlan:
        """A plan for about `tokens` tokens, in parts of whole rows.

        Raises:
            ConfigError: no tokens, or less than one.
        """
        if tokens < 1 or part_tokens < 1:
            raise ConfigError(f"tokens must be at least 1, found {min(tokens, part_tokens)}")
        row = max(phase.row_tokens, phase.long_row_tokens)
        rows = max(1, min(part_tokens, tokens) // row)
        size = rows * row
        return cls(phase=phase, seed=seed, parts=max(1, round(tokens / size)), part_tokens=size)

    def meta(self, tokenizer: Tokenizer) -> dict[str, object]:
        """Content of `meta.json`."""
        phase = self.phase
        return {
            "phase": phase.name,
            "seed": self.seed,
            "vocab_size": tokenizer.vocab_size,
            "parts": self.parts,
            "part_tokens": self.part_tokens,
            "row_tokens": phase.row_tokens,
            "long_parts_every": phase.long_parts_every,
            "long_row_tokens": phase.long_row_tokens,
            "target_bit": 15,
            "shares": phase.shares,
        }


def write_store(plan: StorePlan, maker: PartMaker, out: Path, *, workers: int) -> int:
    """Write a store; parts that are already there are kept.

    Args:
        plan: what to write.
        maker: the generators; forked processes share its memory.
        out: folder, made if need be.
        workers: processes; 1 works in this one.

    Returns:
        Number of tokens written by this call.

    Raises:
        ConfigError: the folder holds a store of another plan.
    """
    out.mkdir(parents=True, exist_ok=True)
    meta = json.dumps(plan.meta(maker.tokenizer), indent=1) + "\n"
    path = out / "meta.json"
    if path.exists() and path.read_text("utf-8") != meta:
        raise ConfigError(f"{out} holds a store made with other settings; use another folder")
    path.write_text(meta, "utf-8")
    missing = [i for i in range(plan.parts) if not _part_path(out, i).exists()]
    start = time.monotonic()
    written = 0
    totals: dict[str, int] = {}
    for made in _run(_Job(plan, maker, out), missing, workers):
        written += plan.part_tokens
        for task, count in made.items():
            totals[task] = totals.get(task, 0) + count
        rate = written / (time.monotonic() - start)
        logger.info("%s: %d tokens, %.0f tokens/s", plan.phase.name, written, rate)
    (out / "DONE").write_text(json.dumps(totals) + "\n", "utf-8")
    return written


@dataclass(slots=True)
class _Job:
    plan: StorePlan
    maker: PartMaker
    out: Path

    def __call__(self, index: int) -> dict[str, int]:
        plan = self.plan
        stored, made = self.maker.part(
            plan.phase, seed=plan.seed, index=index, parts=plan.parts, tokens=plan.part_tokens
        )
        path = _part_path(self.out, index)
        partial = path.with_suffix(".partial")
        partial.write_bytes(stored.astype("<u2", copy=False).tobytes())
        partial.replace(path)
        return made


_job: _Job | None = None


def _run_in_worker(index: int) -> dict[str, int]:
    if _job is None:
        raise ConfigError("a worker was started without its job")
    return _job(index)


def _run(job: _Job, indices: Sequence[int], workers: int) -> Iterator[dict[str, int]]:
    """Results of the job for each index, in order."""
    # Forked workers inherit it; pickling the corpus for each of them would take minutes.
    global _job  # noqa: PLW0603
    if workers == 1 or len(indices) < 2:
        yield from map(job, indices)
        return
    _job = job
    with multiprocessing.get_context("fork").Pool(min(workers, len(indices))) as pool:
        yield from pool.imap(_run_in_worker, indices)


def _part_path(out: Path, index: int) -> Path:
    return out / f"part-{index:05d}.bin"


def natural_tokens(
    corpus: Corpus, tokenizer: Path, archive: Path | None, cache: Path
) -> NaturalTokens:
    """The prose of training as tokens, from the cache folder when it is already there."""
    if archive is None:
        return NaturalTokens.none()
    digest = hashlib.sha256(tokenizer.read_bytes() + archive.read_bytes()).hexdigest()[:16]
    path = cache / f"natural-{digest}.npz"
    if path.exists():
        return NaturalTokens.load(path)
    encoder = TextEncoder(Tokenizer.from_json(tokenizer))
    natural = NaturalTokens.of(corpus.prose, encoder)
    cache.mkdir(parents=True, exist_ok=True)
    natural.save(path)
    return natural


def token_number(text: str) -> int:
    """A number of tokens such as `120M` or `5000`.

    Raises:
        argparse.ArgumentTypeError: not such a number.
    """
    scale = _SUFFIXES.get(text[-1:].upper(), 1)
    digits = text[:-1] if scale > 1 else text
    try:
        return round(float(digits) * scale)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a number of tokens: {text!r}") from None


def main() -> None:
    """Parse the command line and write a store or the validation file."""
    parser = argparse.ArgumentParser(prog="python -m pocket.generate", description=__doc__)
    parser.add_argument("--phase", choices=["A", "B", "C", "D", "val"], required=True)
    parser.add_argument("--corpus", type=Path, help="archive; without it own generators only")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder or tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder of the store")
    parser.add_argument("--tokens", type=token_number, default=10**6)
    parser.add_argument("--part-tokens", type=token_number, default=PART_TOKENS)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--items", type=int, default=200, help="validation items per set")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    corpus = load_corpus(arguments.corpus) if arguments.corpus else Corpus()
    path = arguments.tokenizer
    path = path / "tokenizer.json" if path.is_dir() else path
    tokenizer = Tokenizer.from_json(path)
    if arguments.phase == "val":
        items = validation_items(corpus, tokenizer, items=arguments.items)
        count = write_items(arguments.out, items)
        logger.info("%s: %d documents", arguments.out, count)
        return
    corpus = training_corpus(corpus)
    natural = natural_tokens(corpus, path, arguments.corpus, arguments.out.parent)
    maker = PartMaker(corpus, tokenizer, natural)
    plan = StorePlan.of(
        PHASES[arguments.phase],
        tokens=arguments.tokens,
        seed=arguments.seed,
        part_tokens=arguments.part_tokens,
    )
    write_store(plan, maker, arguments.out, workers=arguments.workers)


if __name__ == "__main__":
    main()
