"""Coverage-guided fuzzing of the safetensors readers; needs atheris.

    python tests/fuzz/fuzz_safetensors.py -max_total_time=120 SCRATCH tests/fuzz/corpus/safetensors

New inputs go to the directory SCRATCH. Every finding becomes a named unit test.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["edgedsv4"]):
    from safetensors_target import Target

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        atheris.Setup(sys.argv, Target(Path(scratch)).run)
        atheris.Fuzz()
