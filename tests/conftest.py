"""Options and settings that every test shares."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch

FRESH_SEED = pytest.StashKey[int | None]()

# transformers is an optional extra (`parity`); without it the comparison with it does not exist.
# A machine that is there for its GPU has neither the terminal app nor the tools of packaging.
NEEDS = {
    "parity/test_transformers.py": "transformers",
    "tui": "textual",
    "capi/test_packaging_files.py": "pkgconf",
}
LEFT_OUT = {path: name for path, name in NEEDS.items() if importlib.util.find_spec(name) is None}
collect_ignore = list(LEFT_OUT)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that draw a new random model, or draw a printed one again."""
    if importlib.util.find_spec("pytest_asyncio") is None:
        # A machine that is there for its GPU has no terminal app; its settings are unknown then.
        for name in ("asyncio_mode", "asyncio_default_fixture_loop_scope"):
            parser.addini(name, "of pytest-asyncio, which is not installed")
    group = parser.getgroup("edgedsv4")
    group.addoption(
        "--fresh",
        action="store_true",
        help="compare one newly drawn random model with transformers; the header prints its seed",
    )
    group.addoption(
        "--seed",
        type=int,
        default=None,
        help="compare only the random model of this seed (as printed by --fresh)",
    )
    group.addoption(
        "--smooth",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="also test the foreign model `smooth`, which is too large for the repository"
        " (tests/data/README.md)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Draw the fresh seed once, and keep torch to one thread, here and in child processes.

    The models are so small that a second thread gains nothing, and beside other test processes on
    the same two cores the threads of torch wait for each other: six times slower, measured.
    """
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    drawn = secrets.randbelow(1 << 31) if config.getoption("--fresh") else None
    config.stash[FRESH_SEED] = worker.get("fresh_seed", drawn)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the drawn seed to the workers of pytest-xdist, which must all collect the same tests."""
    node.workerinput["fresh_seed"] = node.config.stash[FRESH_SEED]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the model `smooth` out unless its folder is named."""
    is_left_out = collection_path.name == "test_smooth_logits.py" and not config.option.smooth
    return True if is_left_out else None


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say which seed was drawn, and what was left out."""
    lines = []
    if config.stash[FRESH_SEED] is not None:
        seed = config.stash[FRESH_SEED]
        lines.append(f"fresh random model: seed {seed} (again with --seed {seed})")
    lines += [
        f"{name} is not installed: {path} is not collected" for path, name in LEFT_OUT.items()
    ]
    if config.option.smooth is None:
        lines.append("without --smooth FOLDER: parity/test_smooth_logits.py is not collected")
    return lines


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fill `drawn_seed` with the stored seeds of the module, a fresh one, or the one asked for."""
    if "drawn_seed" not in metafunc.fixturenames:
        return
    asked = metafunc.config.getoption("--seed")
    fresh = metafunc.config.stash[FRESH_SEED]
    seeds = list(metafunc.module.SEEDS)
    if asked is not None:
        seeds = [asked]
    elif fresh is not None:
        seeds = [fresh]
    metafunc.parametrize("drawn_seed", seeds)


@pytest.fixture(autouse=True)
def _untouched_log() -> None:
    """The library's log as Python makes it: the doors send it where one test looks.

    Before a test and not after it, for fixtures of whole modules go through the doors, too.
    """
    logger = logging.getLogger("edgedsv4")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
