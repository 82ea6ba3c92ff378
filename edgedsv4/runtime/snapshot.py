"""What of a session is saved, and how it becomes a session again.

Saved is what a token costs to compute: the KV cache in the precision it is kept in, the logits and
streams of the end, the newest turn checkpoints, and the replies with the tokens they were sampled
as. Left out is what the next call makes by itself: rows of the draft block (it reads its window
from the streams), older checkpoints, and measurements of drafting, which belong to a machine.

A snapshot is read into a new timeline beside the live one; only when its last checksum was right
does the session take it, in one assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from edgedsv4.errors import ConfigError, ContextFullError
from edgedsv4.formats.snapshot_file import Meter, Snapshot, Source, open_snapshot
from edgedsv4.formats.snapshot_header import (
    MAX_NOTE_BYTES,
    CheckpointRecord,
    SnapshotHeader,
    SnapshotLayout,
    SnapshotModel,
)
from edgedsv4.formats.snapshot_turns import decode_turns, encode_turns
from edgedsv4.formats.snapshot_write import write_snapshot
from edgedsv4.model.cache_state import (
    as_bytes,
    cache_blocks,
    cache_layout,
    checkpoint_blocks,
    fill_cache,
    fill_tensor,
    read_checkpoint,
    ring_starts,
)
from edgedsv4.runtime.checkpoints import TurnCheckpoint
from edgedsv4.runtime.replies import SampledTurns
from edgedsv4.text.messages import Piece

if TYPE_CHECKING:
    from typing import BinaryIO

    from torch import Tensor

    from edgedsv4.formats.checkpoint import Checkpoint
    from edgedsv4.model.cache_state import Bytes, Fill
    from edgedsv4.model.kv_cache import CacheCheckpoint
    from edgedsv4.model.model import Model
    from edgedsv4.runtime.timeline import Logits, Progress, Timeline
    from edgedsv4.text.tokenizer import Tokenizer

STORED_CHECKPOINTS: Final = 4
"""Newest turn checkpoints that are saved: the prompts and replies of two turns."""


@dataclass(frozen=True, slots=True)
class SessionState:
    """What is saved."""

    timeline: Timeline
    turns: SampledTurns
    note: bytes
    """The caller's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotContext:
    """What reading and writing needs beside the timeline itself."""

    model: Model
    owner: SnapshotModel
    backend: str
    """Name of what computes."""
    on_progress: Progress | None
    check: Callable[[], None]
    """Raises to stop."""


def session_owner(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> SnapshotModel:
    """Which model a session belongs to; an MTP block that was added to it makes no difference.

    Reads a little of every weight.
    """
    main = checkpoint.main or checkpoint
    return SnapshotModel(
        name=main.name,
        architecture=main.config.architecture,
        identity_sha256=main.identity_sha256,
        weights_sha256=main.weights_sha256(),
        tokenizer_sha256=None if tokenizer is None else tokenizer.sha256,
        variant=main.encoding_hint,
    )


def save_session(file: BinaryIO, state: SessionState, context: SnapshotContext) -> None:
    """Write the state of a session to an open file.

    Raises:
        ConfigError: a note that is no bytes or too long.
        StorageError: the file could not be written.
    """
    timeline = state.timeline
    _check_note(state.note)
    timeline.settle()
    cache = timeline.cache
    logits = timeline.last_logits()
    speculation = timeline.speculation
    streams = None if speculation is None else speculation.held_streams(timeline.length)
    kept = [c for c in timeline.checkpoints.newest(STORED_CHECKPOINTS) if c.position]
    totals = timeline.totals
    header = SnapshotHeader(
        writer=_writer(),
        backend=context.backend,
        model=context.owner,
        layout=cache_layout(context.model.config, cache),
        tokens=timeline.length,
        capacity=timeline.capacity,
        totals=(totals.evaluated, totals.rebuilt, totals.generated),
        has_logits=logits is not None,
        rings=ring_starts(cache),
        streams_first=None if streams is None else streams[0],
        checkpoints=tuple(_record(checkpoint) for checkpoint in kept),
    )
    sections = {
        "token_ids": [_numbers(np.array(timeline.token_ids, dtype="<i4"))],
        **cache_blocks(cache),
        "logits": [] if logits is None else [_numbers(logits)],
        "draft_streams": [] if streams is None else [as_bytes(streams[1])],
        "checkpoints": [block for checkpoint in kept for block in _checkpoint_blocks(checkpoint)],
        "turns": [np.frombuffer(encode_turns(_saved_turns(state.turns)), dtype=np.uint8)],
        "note": [np.frombuffer(state.note, dtype=np.uint8)],
    }
    write_snapshot(file, header, sections, on_progress=context.on_progress, check=context.check)


def load_session(
    source: Source,
    live: Timeline,
    context: SnapshotContext,
    make_timeline: Callable[[int], Timeline],
) -> SessionState:
    """Read a snapshot into a new timeline.

    Args:
        source: path or bytes.
        live: the timeline that the new one is to replace; it is only looked at.
        context: the rest of the session.
        make_timeline: makes an empty timeline like `live`, given the tokens of the snapshot; may
            refuse by raising.

    Raises:
        SnapshotError: damaged, or of another model, tokenizer, layout or precision.
        ContextFullError: more tokens than `live` can hold.
        StorageError: the file is missing or cannot be read.
    """
    with open_snapshot(source) as snapshot:
        header = snapshot.info.header
        _check_owner(snapshot, context.owner)
        _check_layout(snapshot, cache_layout(context.model.config, live.cache))
        if header.tokens > live.capacity:
            raise ContextFullError(header.tokens, live.capacity)
        timeline = make_timeline(header.tokens)
        reader = _Sections(snapshot, Meter(_work(snapshot), context.on_progress, context.check))
        token_ids = _read_ids(reader, header)
        fill_cache(timeline.cache, header.tokens, header.rings, reader.open)
        timeline.take_over(token_ids, _read_logits(reader, header))
        _read_streams(reader, header, timeline)
        _read_checkpoints(reader, header, timeline, context.model)
        turns = _read_turns(reader, header, live.capacity)
        note = reader.whole("note")[0].tobytes()
    totals = timeline.totals
    totals.evaluated, totals.rebuilt, totals.generated = header.totals
    return SessionState(timeline, turns, note)


def _check_note(note: object) -> None:
    if not isinstance(note, bytes) or len(note) > MAX_NOTE_BYTES:
        found = f"{len(note):,} bytes" if isinstance(note, bytes) else type(note).__name__
        raise ConfigError(f"note must be bytes, at most {MAX_NOTE_BYTES:,}, found {found}")


def _writer() -> str:
    try:
        return f"edgedsv4 {version('edgedsv4')}"
    except PackageNotFoundError:
        return "edgedsv4"


def _work(snapshot: Snapshot) -> int:
    return sum(section.nbytes for section in snapshot.info.sections)


def _record(checkpoint: TurnCheckpoint) -> CheckpointRecord:
    return CheckpointRecord(
        position=checkpoint.position,
        has_logits=checkpoint.logits is not None,
        has_streams=checkpoint.streams is not None,
        rings=tuple(first for first, _ in checkpoint.state.rings),
    )


def _checkpoint_blocks(checkpoint: TurnCheckpoint) -> list[Bytes]:
    blocks = checkpoint_blocks(checkpoint.state)
    if checkpoint.logits is not None:
        blocks.append(_numbers(checkpoint.logits))
    if checkpoint.streams is not None:
        blocks.append(as_bytes(checkpoint.streams))
    return blocks


def _numbers(values: np.ndarray) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1)


def _saved_turns(turns: SampledTurns) -> list[tuple[tuple[tuple[str, bool], ...], tuple[int, ...]]]:
    return [
        (tuple((piece.text, piece.is_special) for piece in form), ids)
        for form, ids in turns.items()
    ]


def _check_owner(snapshot: Snapshot, own: SnapshotModel) -> None:
    found = snapshot.info.model
    if (found.identity_sha256, found.weights_sha256) != (own.identity_sha256, own.weights_sha256):
        raise snapshot.error(
            f"belongs to another model: {found.name!r:.80} ({found.identity_sha256[:16]}...,"
            f" weights {found.weights_sha256[:16]}...), this is {own.name!r:.80}"
            f" ({own.identity_sha256[:16]}..., weights {own.weights_sha256[:16]}...)",
            fault="mismatch",
        )
    for name, title in (("tokenizer_sha256", "tokenizer"), ("variant", "prompt encoding")):
        theirs, ours = getattr(found, name), getattr(own, name)
        if theirs != ours:
            raise snapshot.error(
                f"belongs to another {title}: {theirs!r:.80}, this model has {ours!r:.80}",
                fault="mismatch",
            )


def _check_layout(snapshot: Snapshot, own: SnapshotLayout) -> None:
    for field in fields(SnapshotLayout):
        theirs, ours = getattr(snapshot.info.layout, field.name), getattr(own, field.name)
        if theirs != ours:
            raise snapshot.error(
                f"stores its state another way: {field.name} is {theirs!r:.80}, this session has"
                f" {ours!r:.80}; open the model with the options it was saved with",
                fault="mismatch",
            )


class _Sections:
    """Opens the sections of a snapshot, each of which is compared when it is closed."""

    def __init__(self, snapshot: Snapshot, meter: Meter) -> None:
        self.snapshot, self._meter = snapshot, meter

    @contextmanager
    def open(self, name: str) -> Iterator[Fill]:
        section = self.snapshot.section(name, self._meter)
        yield section.fill
        section.finish()

    def whole(self, name: str) -> tuple[Bytes, int]:
        """The bytes of a small section, and where in the file they begin."""
        section = self.snapshot.section(name, self._meter)
        return section.rest(), section.offset

    def skip(self, name: str) -> None:
        self.snapshot.section(name, self._meter).skip()


def _read_ids(reader: _Sections, header: SnapshotHeader) -> list[int]:
    data, offset = reader.whole("token_ids")
    ids = data.view("<i4")
    size = header.layout.vocab_size
    bad = np.flatnonzero((ids < 0) | (ids >= size))
    if bad.size:
        raise reader.snapshot.error(
            f"section token_ids: id {ids[bad[0]]} at position {bad[0]}, expected 0..{size - 1}",
            offset + 4 * int(bad[0]),
        )
    found: list[int] = ids.tolist()
    return found


def _read_logits(reader: _Sections, header: SnapshotHeader) -> Logits | None:
    data, offset = reader.whole("logits")
    if not header.has_logits:
        return None
    return _checked_logits(reader, data, "logits", offset)


def _checked_logits(reader: _Sections, data: Bytes, name: str, offset: int) -> Logits:
    logits: Logits = data.view("<f4")
    bad = np.flatnonzero(~np.isfinite(logits))
    if bad.size:
        raise reader.snapshot.error(
            f"section {name}: the logit of token {bad[0]} is {logits[bad[0]]}", offset
        )
    return logits


def _read_streams(reader: _Sections, header: SnapshotHeader, timeline: Timeline) -> None:
    if header.streams_first is None or timeline.speculation is None:
        reader.skip("draft_streams")
        return
    with reader.open("draft_streams") as fill:
        timeline.speculation.fill_streams(header.streams_first, header.tokens, fill)


def _read_checkpoints(
    reader: _Sections, header: SnapshotHeader, timeline: Timeline, model: Model
) -> None:
    width, dtype = model.config.hc_streams * model.config.hidden_size, model.numerics.dtype
    place = next(s for s in reader.snapshot.info.sections if s.name == "checkpoints")
    found: list[tuple[CacheCheckpoint, Bytes | None, Tensor | None]] = []
    with reader.open("checkpoints") as fill:
        for record in header.checkpoints:
            state = read_checkpoint(timeline.cache, record.position, record.rings, fill)
            data = streams = None
            if record.has_logits:
                data = np.empty(4 * header.layout.vocab_size, dtype=np.uint8)
                fill(data)
            if record.has_streams:
                streams = torch.empty((1, width), dtype=dtype, device=model.numerics.device)
                fill_tensor(streams, fill)
            found.append((state, data, streams))
    for state, data, streams in found:
        logits = None
        if data is not None:
            logits = _checked_logits(reader, data, place.name, place.offset)
        kept = None if timeline.speculation is None else streams
        timeline.checkpoints.add(TurnCheckpoint(state, logits, kept))


def _read_turns(reader: _Sections, header: SnapshotHeader, capacity: int) -> SampledTurns:
    data, offset = reader.whole("turns")
    saved = decode_turns(
        data.tobytes(),
        vocab_size=header.layout.vocab_size,
        path=reader.snapshot.info.path,
        offset=offset,
    )
    turns = SampledTurns(limit_tokens=2 * capacity)
    for pieces, ids in saved:
        turns.remember(tuple(Piece(text, is_special) for text, is_special in pieces), ids)
    return turns
