"""NULL in every argument of every function: optional ones work, all others are named.

The calls are made from the header: every pointer argument in turn is NULL while the others are
good.
"""

from __future__ import annotations

import re

import pytest
from capi.programs import HERE, POCKET, Library, Results

from edgedsv4.capi.header import header_path

TEXT = header_path().read_text(encoding="utf-8")
PROTOTYPE = re.compile(r"^int32_t (dsv4_\w+)\(([^;{}]*)\);", re.MULTILINE)
FREES = ("dsv4_cancel_free", "dsv4_engine_close", "dsv4_parser_free", "dsv4_sampler_free")
NOTHING = (*FREES, "dsv4_session_free")
"""Freeing NULL does nothing."""

OPTIONAL = {
    "dsv4_init": {"python"},
    "dsv4_set_log": {"log"},
    "dsv4_plan_json": {"options"},
    "dsv4_engine_open": {"options"},
    "dsv4_chat_render": {"options"},
    "dsv4_chat_encode": {"options"},
    "dsv4_parser_new": {"options"},
    "dsv4_parser_push": {"event", "is_complete"},
    "dsv4_parser_finish": {"event"},
    "dsv4_sampler_new": {"options"},
    "dsv4_session_sync": {"report"},
    "dsv4_session_rewind": {"report"},
    "dsv4_session_generate": {"options", "token", "result"},
    "dsv4_session_reply": {"prompt", "options", "event", "result"},
    "dsv4_session_reply_json": {"prompt", "options", "event", "result"},
    "dsv4_selftest": {"device", "check"},
}
"""What the header calls optional, beside every `dsv4_call` and every `user`."""

GOOD = {
    "abi_version": "DSV4_ABI_VERSION",
    "struct_size": "512",
    "level": "40",
    "path": "model",
    "engine": "engine",
    "session": "ready()",
    "sampler": "sampler",
    "parser": "fresh_parser()",
    "cancel": "fresh_cancel()",
    "text": 'dsv4_str("Hi")',
    "match_special": "0",
    "show_special": "1",
    "chat": 'dsv4_str("[{\\"role\\": \\"user\\", \\"content\\": \\"Hi\\"}]")',
    "messages": "&message",
    "vocab_size": "facts.vocab_size",
    "context": "64",
    "log": "on_log",
    "progress": "on_progress",
    "event": "on_event",
    "check": "NULL",
    "device": '"cpu"',
    "user": "NULL",
    "python": "NULL",
    "report": "&report",
    "result": "&result",
    "stop_tokens": "ids",
    "stop_count": "1",
    "buffer": "buffer",
    "is_complete": "&is_complete",
    "logprobs": "numbers",
    "nll": "numbers",
    "state": "state",
}
BY_TYPE = {
    "size_t *": "&length",
    "const int32_t *tokens": "ids",
    "int32_t *tokens": "room",
    "int32_t *token": "&token",
    "int32_t token": "5",
    "dsv4_token_fn token": "on_token",
    "const float *logits": "scores",
    "float *logits": "scores",
    "const dsv4_engine_options *": "&engine_options",
    "dsv4_engine_options *": "&engine_options",
    "const dsv4_sampling_options *": "&sampling",
    "dsv4_sampling_options *": "&sampling",
    "const dsv4_prompt_options *": "&prompt",
    "dsv4_prompt_options *": "&prompt",
    "const dsv4_call *": "&call",
    "dsv4_error_info *": "&info",
    "dsv4_engine_info *": "&facts",
    "dsv4_session_info *": "&session_facts",
    "dsv4_cancel **": "&other_cancel",
    "dsv4_engine **": "&other_engine",
    "dsv4_session **": "&other_session",
    "dsv4_parser **": "&other_parser",
    "dsv4_sampler **": "&other_sampler",
}
SPECIAL = {
    "dsv4_engine_close.engine": "fresh_engine()",
    "dsv4_session_free.session": "fresh_session()",
    "dsv4_sampler_free.sampler": "fresh_sampler()",
    "dsv4_session_save.path": "state_path",
    "dsv4_session_load.path": "state_path",
    "dsv4_snapshot_inspect_json.path": "state_path",
    "dsv4_sampler_restore.state": "sampler_state",
    "dsv4_sampler_restore.size": "sampler_state_size",
    "dsv4_session_load_memory.size": "state_size",
    "dsv4_session_rewind.count": "1",
    "dsv4_session_top_logprobs.count": "2",
    "dsv4_sampler_sample.count": "(size_t)facts.vocab_size",
    "dsv4_session_save_memory.buffer": "room_for_state",
    "dsv4_session_save_memory.capacity": "state_room",
}
COUNTS = {"int32_t *tokens": "ROOM", "float *logits": "ROOM", "void *buffer": "sizeof buffer"}


def parameters(text: str) -> list[tuple[str, str]]:
    """(declaration, name) of the parameters of a prototype."""
    parts = [" ".join(part.split()) for part in text.split(",")]
    return [(part, re.search(r"\w+$", part)[0]) for part in parts if part != "void"]  # type: ignore[index]


def good(function: str, declaration: str, name: str, others: list[str]) -> str:
    """A value that the function accepts."""
    if f"{function}.{name}" in SPECIAL:
        return SPECIAL[f"{function}.{name}"]
    if name == "capacity":
        return next((room for kind, room in COUNTS.items() if kind in others), "sizeof buffer")
    if name in ("count", "size") and "*" not in declaration:
        return "1" if "const dsv4_message *messages" in others else "3"
    for kind in (declaration, declaration.removesuffix(name)):
        if kind in BY_TYPE:
            return BY_TYPE[kind]
    return GOOD[name]


def calls() -> dict[str, tuple[str, str, bool]]:
    """Check -> (call with one NULL, name of that argument, whether it may be NULL)."""
    found = {}
    for function, text in PROTOTYPE.findall(TEXT):
        listed = parameters(text)
        kinds = [declaration for declaration, _ in listed]
        values = [good(function, declaration, name, kinds) for declaration, name in listed]
        for place, (declaration, name) in enumerate(listed):
            is_pointer = "*" in declaration or re.match(r"dsv4_\w+_fn ", declaration)
            if not is_pointer or function == "dsv4_selftest":
                continue
            may = name == "user" or "dsv4_call" in declaration or function in NOTHING
            may = may or name in OPTIONAL.get(function, ())
            given = [*values[:place], "NULL", *values[place + 1 :]]
            call = f"{function}({', '.join(given)})"
            found[f"{function}.{name}"] = (call, name, may)
    return found


CALLS = calls()
PLAIN = {"dsv4_cancel_trigger", "dsv4_cancel_reset", "dsv4_cancel_is_set", "dsv4_last_error_info"}
"""They leave the stored error alone."""


@pytest.fixture(scope="module")
def results(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("null")
    lines = []
    for check, (call, name, may) in CALLS.items():
        if may:
            lines.append(f'    EXPECT("{check}", {call}, DSV4_OK);')
        elif check.split(".")[0] in PLAIN:
            lines.append(f'    EXPECT("{check}", {call}, DSV4_ERR_INVALID_ARGUMENT);')
        else:
            lines.append(f'    names("{check}", {call}, "{name}");')
    body = "\n".join(lines)
    source = folder / "calls.c"
    source.write_text(
        f'#include "null.h"\n\nint main(int argc, char **argv)\n{{\n    prepare(argc, argv);\n'
        f"{body}\n    return 0;\n}}\n",
        encoding="utf-8",
    )
    return library.results(source, POCKET, folder / "talk.dsv4s", flags=[f"-I{HERE}"])


@pytest.mark.parametrize("check", CALLS)
def test_null(results: Results, check: str) -> None:
    assert results[check] == "ok"


def test_every_function_with_a_pointer_is_called() -> None:
    with_pointers = {name for name, text in PROTOTYPE.findall(TEXT) if "*" in text}
    assert {check.split(".")[0] for check in CALLS} == with_pointers - {"dsv4_selftest"}


@pytest.mark.parametrize("function", OPTIONAL)
def test_the_header_says_what_is_optional(function: str) -> None:
    comment = TEXT[: TEXT.index(f"int32_t {function}(")].rpartition("/*")[2]
    assert re.search(r"optional|NULL|[Tt]he same|as dsv4_", comment)
