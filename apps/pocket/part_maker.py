"""Make one part of a token store: draw tasks by their shares, encode, pack.

A part depends only on the run's seed, the phase and its own number, so any number of workers makes
the same store.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from pocket.documents import DocumentEncoder
from pocket.mixtures import PHASES, Phase
from pocket.packing import RowPacker
from pocket.tasks import VALIDATION_SEED, Tasks

if TYPE_CHECKING:
    from edgedsv4.text.tokenizer import Tokenizer
    from pocket.corpus import Corpus
    from pocket.natural import NaturalTokens

_LOOK_AHEAD_ROWS = 4


def part_seed(seed: int, phase: str, index: int) -> int:
    """Seed of one part, below `VALIDATION_SEED`."""
    return zlib.crc32(f"{seed}/{phase}/{index}".encode()) % VALIDATION_SEED


@dataclass(slots=True)
class PartMaker:
    """Everything a worker needs; made once, shared by forked processes.

    `corpus` holds the training part of the prose only.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    natural: NaturalTokens
    encoder: DocumentEncoder = field(init=False)
    tasks: Tasks = field(init=False)

    def __post_init__(self) -> None:
        self.encoder = DocumentEncoder(self.tokenizer)
        self.tasks = Tasks(self.corpus, lambda text: len(self.encoder.text.encode(text)))

    def part(
        self, phase: Phase, *, seed: int, index: int, parts: int, tokens: int
    ) -> tuple[np.ndarray, dict[str, int]]:
        """The stored tokens of a part, and how many of them each task has.

        Args:
            phase: what to make.
            seed: of the run.
            index: number of the part.
            parts: how many parts the store will have; sets the length of long recall.
            tokens: of the part, a multiple of the row length.
        """
        if phase.is_long_part(index):
            phase = PHASES[f"{phase.name}-long"]
        rng = Random(part_seed(seed, phase.name, index))
        source = _Source(self, phase, rng, progress=index / max(parts - 1, 1))
        packer = RowPacker(phase.row_tokens, source.document, source.fill, rng)
        rows = [packer.row() for _ in range(tokens // phase.row_tokens)]
        return np.concatenate(rows), source.made


class _Source:
    """Draws the documents of one part."""

    def __init__(self, maker: PartMaker, phase: Phase, rng: Random, *, progress: float) -> None:
        self._maker = maker
        self._phase = phase
        self._rng = rng
        first, last = phase.recall_tokens
        self._longest = first + (last - first) * min(1.0, 1.5 * progress)
        has_prose = len(maker.natural.starts) > 0
        known = {*maker.tasks.generators, "recall-L", *(["prose"] if has_prose else [])}
        shares = {task: share for task, share in phase.shares.items() if share and task in known}
        self._shares = {task: share / sum(shares.values()) for task, share in shares.items()}
        self.made = dict.fromkeys((*self._shares, "fill"), 0)

    def document(self) -> np.ndarray:
        """The next document: a task is the likelier, the further its tokens lag behind."""
        total = sum(self.made.values()) + _LOOK_AHEAD_ROWS * self._phase.row_tokens
        deficits = [
            max(0.0, share * total - self.made[task]) for task, share in self._shares.items()
        ]
        task = self._rng.choices(list(self._shares), deficits)[0]
        stored = self._make(task)
        self.made[task] += len(stored)
        return stored

    def fill(self, tokens: int) -> np.ndarray:
        """Exactly so many tokens: prose, or the start of a story when there is none."""
        is_target = "prose" in self._shares
        self.made["prose" if is_target else "fill"] += tokens
        parts: list[np.ndarray] = []
        while tokens > 0:
            parts.append(self._piece(tokens, is_target=is_target))
            tokens -= len(parts[-1])
        return np.concatenate(parts)

    def _piece(self, tokens: int, *, is_target: bool) -> np.ndarray:
        maker = self._maker
        if len(maker.natural.starts):
            return maker.natural.slice(self._rng, tokens, maker.encoder.bos, is_target=is_target)
        return maker.encoder.encode(maker.tasks.generators["stories"](self._rng))[:tokens]

    def _make(self, task: str) -> np.ndarray:
        maker = self._maker
        if task == "prose":
            row = self._phase.row_tokens
            size = min(row, round(128 * (row / 128) ** (0.4 + 0.6 * self._rng.random())))
            return maker.natural.slice(self._rng, size, maker.encoder.bos)
        if task == "recall-L":
            low, high = math.log(self._phase.shortest_recall), math.log(self._longest)
            length = round(math.exp(low + (high - low) * self._rng.random()))
            return maker.encoder.encode(maker.tasks.recall_long(self._rng, length))
        return maker.encoder.encode(maker.tasks.generators[task](self._rng))
