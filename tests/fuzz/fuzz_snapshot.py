"""Coverage-guided fuzzing of the reader of saved sessions; needs atheris.

    python tests/fuzz/fuzz_snapshot.py -max_total_time=120 SCRATCH tests/fuzz/corpus/snapshot

New inputs go to the directory SCRATCH. Every finding becomes a named unit test.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["edgedsv4"]):
    import snapshot_target

if __name__ == "__main__":
    atheris.Setup(sys.argv, snapshot_target.run)
    atheris.Fuzz()
