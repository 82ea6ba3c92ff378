"""What the header of a saved session says, and the sizes that follow from it.

Nothing in a snapshot has a size of its own choice: how many rows each store holds follows from the
number of tokens, the layout of the model's layers and the first position that each ring still has.
`SnapshotHeader.section_bytes` is that calculation; a file whose sections have other sizes is
refused before anything is read into memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edgedsv4.config import MAX_CONTEXT, MAX_LAYERS
from edgedsv4.errors import SnapshotError
from edgedsv4.formats.faults import quoted

if TYPE_CHECKING:
    from edgedsv4.formats.strict_json import JsonValue

SECTIONS: Final = (
    "token_ids",
    "window_rows",
    "compressed_rows",
    "index_keys",
    "partial_windows",
    "logits",
    "draft_streams",
    "checkpoints",
    "turns",
    "note",
)
"""Every section, in file order; each is there, if only with 0 bytes."""
MAX_TURN_BYTES: Final = 4 << 20
MAX_NOTE_BYTES: Final = 16 << 20
FREE_SECTIONS: Final = {"turns": MAX_TURN_BYTES, "note": MAX_NOTE_BYTES}
"""Sections whose size follows from nothing else, with the most that they may have."""
MAX_CHECKPOINTS: Final = 64
_MAX_BYTES: Final = 1 << 24
_MAX_COUNT: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class LayerStores:
    """What one layer keeps beside its window ring."""

    ratio: int
    """Tokens per compressed row; 0 without compression."""
    windows: int
    """Compression windows whose raw rows may still be pooled: 1, or 2 where they overlap."""
    raw_bytes: int
    """One raw row (value and gate) of the compressor; 0 where the layer has none of its own."""
    key_raw_bytes: int
    """One raw row of the indexer's compressor; 0 without an indexer."""


@dataclass(frozen=True, slots=True)
class Ring:
    """One ring: the last rows of a timeline, by position."""

    is_window: bool
    """A window ring; else one of unfinished compression windows."""
    slots: int
    row_bytes: int
    step: int
    """Positions in one window of the compressor; 1 in a window ring."""
    back: int
    """Steps before its own that a token reads as well."""

    def first_needed(self, position: int) -> int:
        """First position whose row evaluating `position` reads."""
        return max(0, (position // self.step - self.back) * self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotLayout:
    """How a model's state is stored; two sessions can exchange it when all of this is equal."""

    profile: str
    dtype: str
    vocab_size: int
    window: int
    spare: int
    """Positions that a ring holds beyond what the next token needs."""
    row_bytes: tuple[int, ...]
    """One key/value row, by part: codes and scales, or one part in the compute type."""
    key_bytes: tuple[int, ...]
    """One index key, by part."""
    stream_bytes: int
    """The residual streams of one position."""
    layers: tuple[LayerStores, ...]

    def rings(self) -> Iterator[Ring]:
        """Every ring: the window rings of all layers, then per layer raw and key raw ones."""
        row = sum(self.row_bytes)
        for _ in self.layers:
            yield Ring(True, self.window + self.spare, row, 1, self.window - 1)
        for layer in self.layers:
            slots = layer.windows * layer.ratio + self.spare
            for nbytes in (layer.raw_bytes, layer.key_raw_bytes):
                if nbytes:
                    yield Ring(False, slots, nbytes, layer.ratio, layer.windows - 1)

    def ring_bytes(self, starts: tuple[int, ...], stop: int) -> tuple[int, int]:
        """Bytes of the (window rings, raw rings) with the positions from `starts` to `stop`."""
        sizes = [0, 0]
        for ring, first in zip(self.rings(), starts, strict=True):
            sizes[not ring.is_window] += (stop - first) * ring.row_bytes
        return sizes[0], sizes[1]

    def compressed_bytes(self, tokens: int) -> tuple[int, int]:
        """Bytes of the (compressed rows, index keys) of `tokens` tokens."""
        rows = sum(tokens // layer.ratio for layer in self.layers if layer.raw_bytes)
        keys = sum(tokens // layer.ratio for layer in self.layers if layer.key_raw_bytes)
        return rows * sum(self.row_bytes), keys * sum(self.key_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotModel:
    """To which model a state belongs."""

    name: str
    architecture: str
    identity_sha256: str
    """Of the model's headers, configuration and file sizes, an attached MTP block left out."""
    weights_sha256: str
    """Of samples of the weights themselves."""
    tokenizer_sha256: str | None
    """Of tokens and merges; None for a model without a tokenizer."""
    variant: str
    """Prompt encoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A turn checkpoint inside a snapshot."""

    position: int
    has_logits: bool
    has_streams: bool
    rings: tuple[int, ...]
    """First position of each ring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHeader:
    """Everything that a snapshot says before its sections."""

    writer: str
    """Program that wrote it; for people."""
    backend: str
    """What computed it; for people, since every backend stores the same bytes."""
    model: SnapshotModel
    layout: SnapshotLayout
    tokens: int
    capacity: int
    """Tokens that the saved session could hold."""
    totals: tuple[int, int, int]
    """Tokens evaluated, rebuilt and generated."""
    has_logits: bool
    """Whether the logits after the last token are there."""
    rings: tuple[int, ...]
    """First position of each ring."""
    streams_first: int | None
    """First position whose residual streams are there; None without any."""
    checkpoints: tuple[CheckpointRecord, ...]

    def section_bytes(self) -> dict[str, int]:
        """Bytes of every section but those of `FREE_SECTIONS`."""
        layout = self.layout
        window, partial = layout.ring_bytes(self.rings, self.tokens)
        rows, keys = layout.compressed_bytes(self.tokens)
        streams = 0 if self.streams_first is None else self.tokens - self.streams_first
        return {
            "token_ids": 4 * self.tokens,
            "window_rows": window,
            "compressed_rows": rows,
            "index_keys": keys,
            "partial_windows": partial,
            "logits": 4 * layout.vocab_size * self.has_logits,
            "draft_streams": streams * layout.stream_bytes,
            "checkpoints": sum(self._checkpoint_bytes(record) for record in self.checkpoints),
        }

    def _checkpoint_bytes(self, record: CheckpointRecord) -> int:
        rings = sum(self.layout.ring_bytes(record.rings, record.position))
        logits = 4 * self.layout.vocab_size * record.has_logits
        return rings + logits + self.layout.stream_bytes * record.has_streams

    def to_json(self) -> dict[str, object]:
        """The header as JSON types; layers as lists, since there are many."""
        fields = asdict(self)
        layout = fields["layout"]
        layout["layers"] = [list(layer.values()) for layer in layout["layers"]]
        return fields


def encode_header(header: SnapshotHeader, table: list[tuple[str, int, str]]) -> bytes:
    """The header with its section table (name, bytes, SHA-256 in hex), as UTF-8 JSON."""
    sections = [list(entry) for entry in table]
    text = json.dumps({**header.to_json(), "sections": sections}, separators=(",", ":"))
    return text.encode()


class _Fields:
    """One JSON object of the header, whose members must be of the type asked for."""

    def __init__(self, value: JsonValue, where: str, path: Path | None) -> None:
        self.where, self.path = where, path
        if not isinstance(value, dict):
            raise self.error("", "an object", value)
        self._left = dict(value)

    def error(self, name: str, expected: str, found: object) -> SnapshotError:
        place = ".".join(part for part in (self.where, name) if part)
        return SnapshotError(
            f"header: {place or 'the whole'} must be {expected}, found {quoted(found)}",
            path=self.path,
        )

    def take(self, name: str) -> JsonValue:
        if name not in self._left:
            raise SnapshotError(
                f"header: {self.where + '.' if self.where else ''}{name} is missing", path=self.path
            )
        return self._left.pop(name)

    def whole(self, name: str, low: int, high: int) -> int:
        return self.check_whole(name, self.take(name), low, high)

    def check_whole(self, name: str, value: JsonValue, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"{low}..{high}", value)
        return value

    def wholes(self, name: str, low: int, high: int) -> tuple[int, ...]:
        value = self.take(name)
        if not isinstance(value, list):
            raise self.error(name, "a list of whole numbers", value)
        return tuple(self.check_whole(name, item, low, high) for item in value)

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            raise self.error(name, "a text", value)
        return value

    def digest(self, name: str) -> str:
        value = self.take(name)
        if not is_digest(value):
            raise self.error(name, "64 hex digits", value)
        return str(value)

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool):
            raise self.error(name, "true or false", value)
        return value

    def object(self, name: str) -> _Fields:
        return _Fields(self.take(name), name, self.path)

    def finish(self) -> None:
        """Raise if something is left that this version does not know."""
        for name in self._left:
            place = ".".join(part for part in (self.where, quoted(name)) if part)
            raise SnapshotError(f"header: {place} is unknown", path=self.path)


def is_digest(value: object) -> bool:
    """Whether a value is a SHA-256 in lower-case hex."""
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def decode_header(
    value: dict[str, JsonValue], path: Path | None
) -> tuple[SnapshotHeader, tuple[tuple[str, int, str], ...]]:
    """Check a header and the sizes of its section table.

    Args:
        value: the JSON object.
        path: for messages.

    Returns:
        The header, and (name, bytes, SHA-256) of each section.

    Raises:
        SnapshotError: it contradicts the format or itself.
    """
    fields = _Fields(value, "", path)
    layout = _layout(fields.object("layout"))
    tokens = fields.whole("tokens", 0, MAX_CONTEXT)
    header = SnapshotHeader(
        writer=fields.text("writer"),
        backend=fields.text("backend"),
        model=_model(fields.object("model")),
        layout=layout,
        tokens=tokens,
        capacity=fields.whole("capacity", max(tokens, 1), MAX_CONTEXT),
        totals=_totals(fields),
        has_logits=fields.flag("has_logits"),
        rings=_ring_starts(fields, layout, tokens),
        streams_first=_streams_first(fields, tokens),
        checkpoints=_checkpoints(fields, layout, tokens),
    )
    if header.has_logits and not tokens:
        raise fields.error("has_logits", "false without tokens", True)
    table = _table(fields)
    fields.finish()
    _check_sizes(header, table, path)
    return header, table


def _model(fields: _Fields) -> SnapshotModel:
    tokenizer = fields.take("tokenizer_sha256")
    if tokenizer is not None and not is_digest(tokenizer):
        raise fields.error("tokenizer_sha256", "64 hex digits or null", tokenizer)
    model = SnapshotModel(
        name=fields.text("name"),
        architecture=fields.text("architecture"),
        identity_sha256=fields.digest("identity_sha256"),
        weights_sha256=fields.digest("weights_sha256"),
        tokenizer_sha256=None if tokenizer is None else str(tokenizer),
        variant=fields.text("variant"),
    )
    fields.finish()
    return model


def _layout(fields: _Fields) -> SnapshotLayout:
    layout = SnapshotLayout(
        profile=fields.text("profile"),
        dtype=fields.text("dtype"),
        vocab_size=fields.whole("vocab_size", 1, _MAX_BYTES),
        window=fields.whole("window", 1, MAX_CONTEXT),
        spare=fields.whole("spare", 0, MAX_CONTEXT),
        row_bytes=_parts(fields, "row_bytes"),
        key_bytes=_parts(fields, "key_bytes"),
        stream_bytes=fields.whole("stream_bytes", 1, _MAX_BYTES),
        layers=_layers(fields),
    )
    fields.finish()
    return layout


def _parts(fields: _Fields, name: str) -> tuple[int, ...]:
    parts = fields.wholes(name, 1, _MAX_BYTES)
    if not 1 <= len(parts) <= 2:
        raise fields.error(name, "one or two sizes", list(parts))
    return parts


def _layers(fields: _Fields) -> tuple[LayerStores, ...]:
    value = fields.take("layers")
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_LAYERS:
        raise fields.error("layers", f"a list of 1..{MAX_LAYERS}", value)
    layers = []
    for item in value:
        if not isinstance(item, list) or len(item) != 4:
            raise fields.error("layers", "lists of four numbers", item)
        ratio, windows, raw, key = (
            fields.check_whole("layers", number, 0, _MAX_BYTES) for number in item
        )
        if (raw or key) and not (ratio and windows):
            raise fields.error("layers", "a ratio and windows where rows are kept", item)
        layers.append(LayerStores(ratio, windows, raw, key))
    return tuple(layers)


def _totals(fields: _Fields) -> tuple[int, int, int]:
    totals = fields.wholes("totals", 0, _MAX_COUNT)
    if len(totals) != 3:
        raise fields.error("totals", "three numbers", list(totals))
    return totals[0], totals[1], totals[2]


def _ring_starts(fields: _Fields, layout: SnapshotLayout, stop: int) -> tuple[int, ...]:
    """First positions, each with what the next token needs and no more than its ring can hold."""
    starts = fields.wholes("rings", 0, MAX_CONTEXT)
    rings = tuple(layout.rings())
    if len(starts) != len(rings):
        raise fields.error("rings", f"{len(rings)} positions", f"{len(starts)} of them")
    for index, (ring, first) in enumerate(zip(rings, starts, strict=True)):
        low, high = max(0, stop - ring.slots), ring.first_needed(stop)
        if not low <= first <= high:
            raise fields.error(f"rings[{index}]", f"{low}..{high} for {stop} tokens", first)
    return starts


def _streams_first(fields: _Fields, tokens: int) -> int | None:
    first = fields.take("streams_first")
    if first is None:
        return None
    return fields.check_whole("streams_first", first, 0, tokens - 1)


def _checkpoints(
    fields: _Fields, layout: SnapshotLayout, tokens: int
) -> tuple[CheckpointRecord, ...]:
    value = fields.take("checkpoints")
    if not isinstance(value, list) or len(value) > MAX_CHECKPOINTS:
        raise fields.error("checkpoints", f"a list of at most {MAX_CHECKPOINTS}", value)
    found: list[CheckpointRecord] = []
    for item in value:
        inner = _Fields(item, f"checkpoints[{len(found)}]", fields.path)
        lowest = found[-1].position + 1 if found else 1
        position = inner.whole("position", lowest, tokens)
        found.append(
            CheckpointRecord(
                position=position,
                has_logits=inner.flag("has_logits"),
                has_streams=inner.flag("has_streams"),
                rings=_ring_starts(inner, layout, position),
            )
        )
        inner.finish()
    return tuple(found)


def _table(fields: _Fields) -> tuple[tuple[str, int, str], ...]:
    value = fields.take("sections")
    if not isinstance(value, list) or len(value) != len(SECTIONS):
        raise fields.error("sections", f"a list of {len(SECTIONS)}", value)
    table = []
    for name, item in zip(SECTIONS, value, strict=True):
        if not isinstance(item, list) or len(item) != 3 or item[0] != name:
            raise fields.error(f"sections.{name}", "[name, bytes, SHA-256]", item)
        if not is_digest(item[2]):
            raise fields.error(f"sections.{name}", "64 hex digits as SHA-256", item[2])
        size = fields.check_whole(f"sections.{name}", item[1], 0, _MAX_COUNT)
        table.append((name, size, str(item[2])))
    return tuple(table)


def _check_sizes(
    header: SnapshotHeader, table: tuple[tuple[str, int, str], ...], path: Path | None
) -> None:
    expected = header.section_bytes()
    for name, size, _ in table:
        if name in FREE_SECTIONS:
            most = FREE_SECTIONS[name]
            is_right, wanted = size <= most, f"at most {most:,}"
        else:
            is_right, wanted = size == expected[name], f"{expected[name]:,}"
        if not is_right:
            raise SnapshotError(
                f"header: section {name} has {size:,} bytes, expected {wanted}"
                f" for {header.tokens:,} tokens",
                path=path,
            )
