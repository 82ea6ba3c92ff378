"""Write edgedsv4/data/pocket-v4/golden.json again: what the self test expects of `pocket-v4`.

    python tests/data/make_selftest_golden.py [OUTPUT]

Greedy token ids that are the same in both profiles, by the C kernels and by torch, from prompts
whose tokens are all clear choices; `smallest_gap` is the smallest distance of the two largest
logits on the way, by profile.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from edgedsv4 import Engine, EngineOptions, Message, PromptOptions, SamplingOptions

STORED = Path(__file__).parents[2] / "edgedsv4" / "data" / "pocket-v4" / "golden.json"
PROMPTS = (("What does water mean?", "none"), ("What is 123 + 456?", "high"))
GREEDY = SamplingOptions(temperature=0, max_tokens=32)


def golden_case(engine: Engine, message: str, thinking: str) -> tuple[dict[str, object], float]:
    """The answer to one message, and its smallest gap."""
    prompt = engine.render([Message("user", message)], PromptOptions(thinking=thinking))
    prompt_ids = engine.tokenizer.encode_pieces(prompt.pieces)
    with engine.new_session() as session:
        session.sync(prompt_ids)
        token_ids = list(session.generate(GREEDY))
    with engine.new_session() as session:
        logits = session.evaluate([*prompt_ids, *token_ids[:-1]], logits="all")
    assert logits is not None
    best = np.sort(logits[len(prompt_ids) - 1 :], axis=1)[:, -2:]
    case = {
        "message": message,
        "thinking": thinking,
        "text": engine.tokenizer.decode(token_ids),
        "prompt_ids": prompt_ids,
        "token_ids": token_ids,
    }
    return case, float((best[:, 1] - best[:, 0]).min())


def golden() -> dict[str, object]:
    """The whole file; refuses to be made where profiles or backends disagree."""
    made: list[dict[str, object]] = []
    for message, thinking in PROMPTS:
        cases, gaps = [], {}
        for backend in ("native", "reference"):
            for profile in ("exact", "default"):
                options = EngineOptions(backend=backend, profile=profile, context=256, threads=1)
                with Engine.open("pocket-v4", options) as engine:
                    case, gap = golden_case(engine, message, thinking)
                    identity = engine.describe()["identity_sha256"]
                cases.append(case)
                gaps[profile] = round(gap, 2)
        assert all(case == cases[0] for case in cases), f"{message}: not the same everywhere"
        made.append({**cases[0], "smallest_gap": gaps})
    return {"model_identity_sha256": identity, "cases": made}


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else STORED
    target.write_text(json.dumps(golden(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
