"""Settings of the command line's tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _same_log_handlers() -> Iterator[None]:
    """`main` sends the library's warnings to the streams of one test, which are closed after it."""
    logger = logging.getLogger("edgedsv4")
    before = (logger.handlers, logger.propagate)
    yield
    logger.handlers, logger.propagate = before
