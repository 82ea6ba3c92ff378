"""Write tests/data/routes/*.routes again: routes of the pocket models in sampled conversations.

    PYTHONPATH=tests:apps python tests/data/make_route_traces.py [FOLDER]

Every conversation is a session of its own: its prompts are marked as prefill, what the model says
as decode. Sampled at temperature 1 with fixed seeds, profile `exact`, one thread.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pocket
from greedy import TEST_OPTIONS

from edgedsv4 import Engine, Message, SamplingOptions
from edgedsv4.formats.route_trace import RouteWriter, write_route_trace
from edgedsv4.runtime.expert_profile import RouteRecorder, route_shape

FOLDER = Path(__file__).parent / "routes"
MODELS = {
    "pocket-v4": "pocket-v4",
    "pocket-v4-e16": str(Path(pocket.__file__).parent / "models" / "pocket-v4-e16.gguf"),
}
QUESTIONS = (
    "Tell me a story about a fox named Mia.",
    "What does river mean?",
    "Tell me a story about a bear named Tom.",
    "What is 12 + 7?",
    "What is the capital of France?",
    "Tell me a story about a cat named Lily.",
    "What does light mean?",
    "Reverse these words: river apple stone",
    "Tell me a story about a dog named Max.",
    "Spell elephant.",
    "What does mountain mean?",
    "Tell me a story about a mouse named Ben.",
)
ROUNDS = 4
REPLY_TOKENS = 200


def record(engine: Engine, writer: RouteWriter) -> None:
    """Hold every conversation and write its routes."""
    for seed in range(ROUNDS * len(QUESTIONS)):
        hold_conversation(engine, writer, seed)


def hold_conversation(engine: Engine, writer: RouteWriter, seed: int) -> None:
    """One question and its reply."""
    begins = True

    def take(ids: npt.NDArray[np.int64]) -> None:
        nonlocal begins
        writer.append(ids, "decode" if len(ids) == 1 else "prefill", begins_text=begins)
        begins = False

    options = SamplingOptions(temperature=1.0, seed=seed, max_tokens=REPLY_TOKENS)
    messages = [Message(role="user", content=QUESTIONS[seed % len(QUESTIONS)])]
    recorder = RouteRecorder(engine.config.num_layers, take)
    with engine.new_session(on_experts=recorder) as session:
        for _ in session.reply(messages, options):
            pass


def main(folder: Path) -> None:
    """Write the traces of all models."""
    for name, model in MODELS.items():
        with Engine.open(model, TEST_OPTIONS) as engine:
            shape = route_shape(engine)
            identity = str(engine.describe()["identity_sha256"])
            path = folder / f"{name}.routes"
            with write_route_trace(path, shape, identity_sha256=identity) as writer:
                record(engine, writer)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
