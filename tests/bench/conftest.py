"""Tests of the benchmarks import them by name, as the benchmarks import each other."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
