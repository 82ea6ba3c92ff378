"""Puzzles of reasoning-gym, generated once in an environment of their own.

The package brings dependencies that the project does not want, so a throw-away virtual environment
runs it and only the text comes back.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pocket.corpus.ascii_text import ascii_text

logger = logging.getLogger(__name__)

PACKAGE = "reasoning-gym"
TASKS = (
    "aiw",
    "basic_arithmetic",
    "calendar_arithmetic",
    "chain_sum",
    "coin_flip",
    "family_relationships",
    "gcd",
    "leg_counting",
    "letter_counting",
    "needle_haystack",
    "number_sequence",
    "simple_equations",
    "spell_backward",
    "syllogism",
    "word_sequence_reversal",
    "word_sorting",
)
ITEMS_PER_TASK = 1000
_MAX_CHARS = 900
_PROGRAM = """
import json, sys
import reasoning_gym
for task in sys.argv[2:]:
    options = {"max_num_statements": 20} if task == "needle_haystack" else {}
    for item in reasoning_gym.create_dataset(task, size=int(sys.argv[1]), seed=1, **options):
        print(json.dumps({"task": task, "question": item["question"], "answer": item["answer"]}))
"""


def records(wheel: Path, folder: Path) -> Iterator[dict[str, object]]:
    """One record per puzzle: task, question, answer.

    Args:
        wheel: the verified package file.
        folder: where the virtual environment is made, once.
    """
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        logger.info("installing %s into a virtual environment of its own", PACKAGE)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "-q", str(wheel)]
        subprocess.run(install, check=True, capture_output=True)
        (folder / "complete").touch()
    # Some generators iterate over sets; a fixed hash makes them repeat.
    command = ["env", "PYTHONHASHSEED=0", str(python), "-c", _PROGRAM, str(ITEMS_PER_TASK), *TASKS]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line in output.splitlines():
        record = json.loads(line)
        question = ascii_text(str(record["question"])).strip()
        answer = ascii_text(str(record["answer"])).strip()
        if answer and len(question) <= _MAX_CHARS:
            yield {"task": record["task"], "question": question, "answer": answer}
