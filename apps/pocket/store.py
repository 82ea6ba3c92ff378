"""Reads a token store: parts of a stream that another process may still be writing.

A store is a directory of `part-00000.bin`, `part-00001.bin`, ... (little-endian uint16: bits 0-11
token id, bit 15 set where the token is a loss target), a `meta.json` and, once complete, a file
`DONE`. Parts get their name when they are whole, so a part that can be seen can be read. A reader
waits for the next part while there is no `DONE`, and begins again behind the last one. Every so
many parts, if `meta.json` says so, one has rows for long sequences.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgedsv4.errors import FormatError

TOKEN_MASK: Final = 0x0FFF
TARGET_BIT: Final = 0x8000
LOOK_AHEAD: Final = 3
"""Tokens behind a sequence that its targets need: next, next but one, and one more."""
_POLL_SECONDS: Final = 0.2
_PREFETCH: Final = 4

Codes = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Position:
    """Where in a store the next token is."""

    part: int = 0
    offset: int = 0
    epoch: int = 0
    """How often the whole store has been read."""


class TokenReader:
    """The stream of one store."""

    def __init__(
        self,
        directory: Path,
        position: Position | None = None,
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Open a store.

        Args:
            directory: of the parts; it may still be empty or missing.
            position: where to begin.
            should_stop: asked while waiting for a part.
        """
        self.directory = directory
        self.position = position or Position()
        self._should_stop = should_stop
        self._loaded: tuple[int, Codes] | None = None

    def read(self, count: int, look_ahead: int = 0) -> Codes:
        """The next `count` codes and the `look_ahead` ones after them, which stay unread.

        Raises:
            FormatError: if the store is complete and empty, or a part is damaged.
            InterruptedError: if asked to stop while waiting.
        """
        result, end = self._take(self.position, count)
        self.position = end
        if not look_ahead:
            return result
        ahead, _ = self._take(end, look_ahead)
        return np.concatenate((result, ahead))

    def is_at_long_part(self) -> bool:
        """Whether the next token is in a part of long rows; waits for that token."""
        self.position, _ = self._at(self.position)
        path = self.directory / "meta.json"
        every = 0
        if path.exists():
            every = int(json.loads(path.read_text(encoding="utf-8")).get("long_parts_every", 0))
        return every > 0 and self.position.part % every == every - 1

    def _take(self, position: Position, count: int) -> tuple[Codes, Position]:
        pieces: list[Codes] = []
        missing = count
        while missing:
            position, codes = self._at(position)
            piece = codes[position.offset : position.offset + missing]
            pieces.append(piece)
            missing -= len(piece)
            position = replace(position, offset=position.offset + len(piece))
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint16), position

    def _at(self, position: Position) -> tuple[Position, Codes]:
        """The part that holds `position`, or the start of the one that follows it."""
        empty = 0
        while True:
            codes = self._part(position.part)
            if codes is None:
                if position.part == 0 or empty > position.part:
                    raise FormatError("the token store holds no tokens", path=self.directory)
                position = Position(0, 0, position.epoch + 1)
                continue
            if position.offset < len(codes):
                return position, codes
            empty += 1
            position = Position(position.part + 1, 0, position.epoch)

    def _part(self, number: int) -> Codes | None:
        """Codes of a part; None behind the last part of a complete store."""
        if self._loaded is not None and self._loaded[0] == number:
            return self._loaded[1]
        path = self.directory / f"part-{number:05d}.bin"
        while not path.exists():
            # DONE is looked up first: a part that came just before it must not be missed.
            is_complete = (self.directory / "DONE").exists()
            if path.exists():
                break
            if is_complete:
                return None
            if self._should_stop():
                raise InterruptedError
            time.sleep(_POLL_SECONDS)
        if path.stat().st_size % 2:
            raise FormatError("a part must hold whole uint16 codes", path=path)
        codes = np.fromfile(path, dtype="<u2")
        self._loaded = (number, codes)
        return codes


@dataclass(frozen=True)
class Batch:
    """Sequences to train on."""

    tokens: Tensor
    """[B, S + 3] int64."""
    weights: Tensor
    """[3, B, S] float32: of the targets one, two and three tokens ahead."""
    totals: tuple[float, float, float]
    """Sums of `weights`."""
    position: Position
    """Of the reader, after this batch."""

    @property
    def length(self) -> int:
        """S."""
        return int(self.weights.shape[-1])

    def part(self, rows: slice, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens and weights of some sequences, on their way to a device."""
        tokens = self.tokens[rows].to(device, non_blocking=True)
        return tokens, self.weights[:, rows].to(device, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class TargetRule:
    """Which tokens count, and how much."""

    prompt_weight: float
    """Weight of tokens that are no loss targets."""
    unpredictable: tuple[int, ...] = (0, 2)
    """Ids that are never a target: BOS and padding follow from nothing."""


def make_batch(codes: Codes, shape: tuple[int, int], rule: TargetRule, position: Position) -> Batch:
    """Cut B * S + 3 codes into sequences with their targets' weights.

    Args:
        codes: consecutive codes of a store.
        shape: (B, S).
        rule: weights of targets.
        position: of the reader behind the B * S codes.
    """
    rows, length = shape
    starts = np.arange(rows)[:, None] * length + np.arange(length + LOOK_AHEAD)
    cut = codes[starts]
    tokens = (cut & TOKEN_MASK).astype(np.int64)
    weight = np.where(cut & TARGET_BIT, np.float32(1), np.float32(rule.prompt_weight))
    known = ~np.isin(tokens, rule.unpredictable)
    weights = np.zeros((LOOK_AHEAD, rows, length), dtype=np.float32)
    reachable = np.ones((rows, length), dtype=bool)
    for ahead in range(1, LOOK_AHEAD + 1):
        part = slice(ahead, ahead + length)
        # A target behind the start of another document is none.
        reachable &= known[:, part]
        weights[ahead - 1] = weight[:, part] * reachable
    totals = [float(total) for total in weights.sum(axis=(1, 2), dtype=np.float64)]
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(weights),
        (totals[0], totals[1], totals[2]),
        position,
    )


class BatchLoader:
    """Prepares batches in a thread, ahead of the trainer; close it after use."""

    def __init__(
        self,
        directory: Path,
        position: Position,
        shape: Callable[[bool], tuple[int, int]],
        rule: TargetRule,
        *,
        is_pinned: bool = False,
    ) -> None:
        """Start reading.

        Args:
            directory: of the store.
            position: of the first token.
            shape: (B, S) of a batch, by whether the store has long rows there.
            rule: weights of targets.
            is_pinned: put batches into page-locked memory, for copies that do not wait.
        """
        self._stopped = threading.Event()
        self._batches: queue.Queue[Batch | BaseException] = queue.Queue(_PREFETCH)
        self._rule, self._is_pinned = rule, is_pinned
        reader = TokenReader(directory, position, should_stop=self._stopped.is_set)
        self._thread = threading.Thread(target=self._fill, args=(reader, shape), daemon=True)
        self._thread.start()

    def batches(self, should_stop: Callable[[], bool] = lambda: False) -> Iterator[Batch]:
        """The batches in turn.

        Args:
            should_stop: asked while the store has no more tokens yet; ends the iteration.
        """
        while True:
            try:
                batch = self._batches.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if should_stop():
                    return
                continue
            if isinstance(batch, BaseException):
                raise batch
            yield batch

    def close(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        while self._thread.is_alive():
            try:
                self._batches.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.05)

    def _fill(self, reader: TokenReader, shape: Callable[[bool], tuple[int, int]]) -> None:
        try:
            while not self._stopped.is_set():
                rows, length = shape(reader.is_at_long_part())
                codes = reader.read(rows * length, LOOK_AHEAD)
                batch = make_batch(codes, (rows, length), self._rule, reader.position)
                self._batches.put(_pinned(batch) if self._is_pinned else batch)
        # A thread's edge: whoever iterates gets the error.
        except BaseException as error:  # noqa: BLE001
            self._batches.put(error)


def _pinned(batch: Batch) -> Batch:
    return replace(batch, tokens=batch.tokens.pin_memory(), weights=batch.weights.pin_memory())


def token_counts(directory: Path, vocab_size: int) -> npt.NDArray[np.int64]:
    """How often each token occurs in the first part of a store, which is waited for."""
    reader = TokenReader(directory)
    reader.read(1)
    first = np.fromfile(directory / "part-00000.bin", dtype="<u2") & TOKEN_MASK
    counts: npt.NDArray[np.int64] = np.bincount(first, minlength=vocab_size).astype(np.int64)
    return counts[:vocab_size]
