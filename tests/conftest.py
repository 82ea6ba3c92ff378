"""Options and settings that every test shares."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that draw a new random model, or draw a printed one again."""
    group = parser.getgroup("edgedsv4")
    group.addoption(
        "--fresh",
        action="store_true",
        help="also compare one newly drawn random model with its peer; its seed is printed",
    )
    group.addoption(
        "--seed",
        type=int,
        default=None,
        help="compare the random model of this seed (as printed by --fresh) with its peer",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and let torch use at most two threads: the suite is made for two cores."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    torch.set_num_threads(min(2, torch.get_num_threads()))
