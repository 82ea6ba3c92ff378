"""Frequency files: how often a model used each of its routed experts on some text.

`edgedsv4 profile` writes one, and it is the prior of expert placement. A JSON object:

    format                 "edgedsv4-expert-frequency"
    version                1, or 2 with `next`
    model_identity_sha256  of the model, 64 hexadecimal digits
    corpus                 {"name": str, "sha256": of the text's bytes}
    tokens                 that were evaluated
    experts_per_token      k
    counts                 [L][E], selections; every layer's add up to tokens x k
    next                   optional: what follows each expert (formats/next_pairs.py)

A file has at most `LIMIT_BYTES`; the 61 x 384 counts of V4-Pro need a tenth of it, four pairs of
each of its experts half.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import ConfigError, FormatError
from edgedsv4.formats.faults import FaultList, quoted
from edgedsv4.formats.next_pairs import NextPairs, parse_next_pairs
from edgedsv4.formats.route_trace import RouteShape
from edgedsv4.formats.strict_json import JsonValue, read_json_object
from edgedsv4.formats.whole_file import whole_file

FORMAT = "edgedsv4-expert-frequency"
VERSION = 1
VERSION_OF_PAIRS = 2
LIMIT_BYTES = 2 << 20
"""Of a whole file; parsed JSON takes up to thirty times its bytes."""
_MAX_TOKENS = 1 << 48
_MAX_NAME = 1000
_KEYS = {
    "format",
    "version",
    "model_identity_sha256",
    "corpus",
    "tokens",
    "experts_per_token",
    "counts",
}
_PAIRS = "next"
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ExpertFrequency:
    """Selections of every expert over a corpus."""

    identity_sha256: str
    """Of the model."""
    corpus: str
    """What the text is called."""
    corpus_sha256: str
    """Of the text's bytes."""
    tokens: int
    experts_per_token: int
    counts: npt.NDArray[np.uint64]
    """[L, E]"""
    pairs: NextPairs | None = None
    """Which experts of the next layer follow which."""

    def rates(self) -> npt.NDArray[np.float64]:
        """Uses per token, [L, E]; every layer's add up to `experts_per_token`."""
        return self.counts.astype(np.float64) / self.tokens

    def covered_by(self, share: float) -> float:
        """Share of the selections that fall on this share of the experts, the busiest."""
        counts = np.sort(self.counts.reshape(-1))[::-1]
        return float(counts[: round(share * len(counts))].sum() / counts.sum())

    def check_model(self, identity_sha256: str, layers: int, experts: int) -> None:
        """Refuse the file for a model that it was not made with.

        Raises:
            ConfigError: another shape or identity.
        """
        if self.counts.shape != (layers, experts):
            found = " x ".join(str(size) for size in self.counts.shape)
            raise ConfigError(
                f"the frequency file counts {found} experts, the model has {layers} x {experts};"
                " make one with `edgedsv4 profile`"
            )
        if self.identity_sha256 != identity_sha256:
            raise ConfigError(
                f"the frequency file belongs to model {self.identity_sha256[:12]}..., this one is"
                f" {identity_sha256[:12]}...; make one with `edgedsv4 profile`"
            )


def write_expert_frequency(path: Path, frequency: ExpertFrequency) -> None:
    """Write a frequency file; it takes its name only when it is complete.

    Raises:
        ConfigError: `path` is no file, or the table is too large for the format.
        OSError: it cannot be written.
    """
    document = {
        "format": FORMAT,
        "version": VERSION if frequency.pairs is None else VERSION_OF_PAIRS,
        "model_identity_sha256": frequency.identity_sha256,
        "corpus": {"name": frequency.corpus, "sha256": frequency.corpus_sha256},
        "tokens": frequency.tokens,
        "experts_per_token": frequency.experts_per_token,
        "counts": frequency.counts.tolist(),
    }
    if frequency.pairs is not None:
        document[_PAIRS] = frequency.pairs.to_json()
    data = json.dumps(document, separators=(",", ":")).encode() + b"\n"
    if len(data) > LIMIT_BYTES:
        raise ConfigError(f"the frequency file would have {len(data):,} of {LIMIT_BYTES:,} bytes")
    with whole_file(path) as file:
        file.write(data)


def read_expert_frequency(path: Path) -> ExpertFrequency:
    """Read a frequency file.

    Raises:
        FormatError: missing, or not what the format promises; every fault is named.
    """
    document = read_json_object(path, limit_bytes=LIMIT_BYTES)
    version = document.get("version")
    if document.get("format") != FORMAT or version not in (VERSION, VERSION_OF_PAIRS):
        found = f"{quoted(document.get('format'))} version {quoted(version)}"
        raise FormatError(
            f"expected {FORMAT!r} version {VERSION} or {VERSION_OF_PAIRS}, found {found}", path=path
        )
    keys = _KEYS if version == VERSION else _KEYS | {_PAIRS}
    faults = FaultList(path)
    for name in sorted(document.keys() ^ keys):
        faults.add(f"{'missing' if name in keys else 'unknown'} key {quoted(name)}")
    faults.raise_if_any("the keys are wrong")
    tokens = _whole(faults, document, "tokens", _MAX_TOKENS)
    per_token = _whole(faults, document, "experts_per_token", 4096)
    identity = _digest(faults, document["model_identity_sha256"], "model_identity_sha256")
    name, digest = _corpus(faults, document["corpus"])
    counts = _counts(faults, document["counts"], tokens, per_token)
    pairs = None
    if _PAIRS in document and len(counts):
        pairs = parse_next_pairs(faults, document[_PAIRS], counts, tokens)
    faults.raise_if_any("the frequency file is damaged")
    return ExpertFrequency(identity, name, digest, tokens, per_token, counts, pairs)


def _whole(faults: FaultList, document: dict[str, JsonValue], name: str, limit: int) -> int:
    value = document[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        faults.add(f"{name} must be a number 1..{limit}, found {quoted(value)}")
        return 1
    return value


def _corpus(faults: FaultList, value: JsonValue) -> tuple[str, str]:
    """Name and digest of the corpus."""
    if not isinstance(value, dict) or value.keys() != {"name", "sha256"}:
        faults.add(f"corpus must have name and sha256, found {quoted(value)}")
        return "", ""
    name = value["name"]
    if not isinstance(name, str) or len(name) > _MAX_NAME:
        faults.add(f"corpus name must be text of at most {_MAX_NAME} characters")
        name = ""
    return name, _digest(faults, value["sha256"], "corpus sha256")


def _digest(faults: FaultList, value: JsonValue, name: str) -> str:
    if not isinstance(value, str) or _DIGEST.fullmatch(value) is None:
        faults.add(f"{name} must be 64 hexadecimal digits, found {quoted(value)}")
        return ""
    return value


def _counts(
    faults: FaultList, value: JsonValue, tokens: int, per_token: int
) -> npt.NDArray[np.uint64]:
    """The table [L, E], or an empty one after a fault."""
    nothing = np.zeros((0, 0), dtype=np.uint64)
    rows = value if isinstance(value, list) else []
    width = len(rows[0]) if rows and isinstance(rows[0], list) else 0
    problem = RouteShape(len(rows), width, per_token).problem()
    if problem is not None:
        faults.add(f"counts: {problem}")
        return nothing
    for layer, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != width:
            faults.add(f"counts of layer {layer} are not {width} numbers")
        elif not all(type(count) is int and 0 <= count <= tokens * per_token for count in row):
            faults.add(f"counts of layer {layer} hold something else than 0..{tokens * per_token}")
        elif sum(row) != tokens * per_token:  # type: ignore[arg-type]  # whole numbers by now
            faults.add(f"counts of layer {layer} do not add up to {tokens} x {per_token}")
    return nothing if len(faults) else np.array(rows, dtype=np.uint64)
