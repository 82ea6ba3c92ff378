"""Runs llama.cpp on orders from stdin, in whichever interpreter has the `llama_cpp` package.

One JSON object a line, both ways. The first one opens a model; `{"prompt": [...], "decode": [...]}`
evaluates token ids on an empty timeline, those of the prompt at once and the others one by one; the
answer has the seconds of both. No part of edgedsv4 is imported here.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp as peer

LOAD_MODES = {"mmap": "LLAMA_LOAD_MODE_MMAP", "read": "LLAMA_LOAD_MODE_NONE"}


class Model:
    """An opened model with one timeline."""

    def __init__(self, order: dict[str, Any]) -> None:
        peer.llama_backend_init()
        model = peer.llama_model_default_params()
        model.n_gpu_layers = 0
        # "read" keeps weights in memory of the peer's own, where it repacks what it can.
        model.load_mode = getattr(peer, LOAD_MODES[order["load"]])
        model.use_extra_bufts = order["repack"]
        self._model = peer.llama_model_load_from_file(order["model"].encode(), model)
        if not self._model:
            raise SystemExit("llama.cpp does not open the model")
        context = peer.llama_context_default_params()
        context.n_ctx = order["context"]
        context.n_batch = context.n_ubatch = order["batch"]
        context.n_threads = context.n_threads_batch = order["threads"]
        context.flash_attn_type = order["flash"]
        context.no_perf = True
        self._context = peer.llama_init_from_model(self._model, context)
        if not self._context:
            raise SystemExit("llama.cpp makes no context")
        self._batch = order["batch"]
        self.vocab_size = peer.llama_vocab_n_tokens(peer.llama_model_get_vocab(self._model))

    def evaluate(self, ids: Sequence[int]) -> None:
        """Append tokens; logits of the last one are computed."""
        for start in range(0, len(ids), self._batch):
            part = ids[start : start + self._batch]
            tokens = (peer.llama_token * len(part))(*part)
            status = peer.llama_decode(self._context, peer.llama_batch_get_one(tokens, len(part)))
            if status:
                raise SystemExit(f"llama_decode returned {status}")
        peer.llama_synchronize(self._context)

    def clear(self) -> None:
        peer.llama_memory_clear(peer.llama_get_memory(self._context), False)

    def logits(self) -> list[float]:
        """Those of the last token."""
        return peer.llama_get_logits_ith(self._context, -1)[: self.vocab_size]


def run(model: Model, order: dict[str, Any]) -> dict[str, Any]:
    """Answer one order."""
    model.clear()
    start = time.perf_counter()
    model.evaluate(order["prompt"])
    prefill = time.perf_counter() - start
    logits = model.logits() if order.get("logits") else None
    start = time.perf_counter()
    for token_id in order["decode"]:
        model.evaluate([token_id])
    return {"prefill": prefill, "decode": time.perf_counter() - start, "logits": logits}


def orders() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    given = orders()
    silent = peer.llama_log_callback(lambda _level, _text, _data: None)
    peer.llama_log_set(silent, ctypes.c_void_p())
    model = Model(next(given))
    system = peer.llama_print_system_info().decode().strip()
    answers: Iterator[dict[str, Any]] = (run(model, order) for order in given)
    print(json.dumps({"version": peer.__version__, "system": system}), flush=True)
    for answer in answers:
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
