"""`edgedsv4 logits` and `edgedsv4 perplexity`: what a model says about given tokens."""

from __future__ import annotations

import argparse
import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import edgedsv4
from edgedsv4.cli.flags import engine_options
from edgedsv4.cli.sources import output_path, read_bytes, read_text
from edgedsv4.errors import ConfigError

if TYPE_CHECKING:
    from edgedsv4.cli.terminal import Terminal

DEFAULT_WINDOW = 512


def logits(args: argparse.Namespace, terminal: Terminal) -> int:
    """Writes float32 [T, V] logits of the tokens of a file."""
    out = output_path(args.out, "--out")
    options = engine_options(args)
    ids = read_ids(args.tokens)
    with edgedsv4.Engine.open(args.model, options, on_progress=terminal.progress) as engine:
        rows, columns = edgedsv4.save_all_logits(engine, ids, out, terminal.evaluated)
    terminal.line(f"{out}: float32 [{rows}, {columns}]")
    return 0


def read_ids(path: str) -> array[int]:
    """Token ids of a file of little-endian int32; raises ConfigError when it is not one."""
    data = read_bytes(path, "--tokens")
    if not data or len(data) % 4:
        raise ConfigError(
            f"--tokens {path}: expected int32 token ids (4 bytes each), found {len(data)} bytes"
        )
    ids = array("i", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def perplexity(args: argparse.Namespace, terminal: Terminal) -> int:
    """Prints how well a model predicts a text and how far it is from saved logits."""
    options = engine_options(args)
    save = None if args.kld_save is None else output_path(args.kld_save, "--kld-save")
    base = None if args.kld_base is None else Path(args.kld_base)
    text = read_text(args.file, "FILE")
    with edgedsv4.Engine.open(args.model, options, on_progress=terminal.progress) as engine:
        score = edgedsv4.score_text(
            engine,
            text,
            window=options.context or DEFAULT_WINDOW,
            save=save,
            base=base,
            on_progress=terminal.evaluated,
        )
    if args.json:
        terminal.json(score.to_json())
        return 0
    for name, value in score.to_json().items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
        terminal.line(f"{name.ljust(16)}{shown}")
    return 0
