"""Functions of the header about models: log, devices, inspect, plan, engine, vocabulary."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import nullcontext, suppress
from typing import Any

from edgedsv4 import (
    CancelledError,
    ConfigError,
    Engine,
    EngineOptions,
    NumericError,
    devices,
    inspect_model,
    plan_model,
    run_selftest,
)
from edgedsv4.capi.bridge import exported, ffi, lib
from edgedsv4.capi.calls import Call
from edgedsv4.capi.handles import HandleTable
from edgedsv4.capi.values import (
    checked_size,
    path_of,
    put_bytes,
    put_json,
    put_text,
    put_tokens,
    read_struct,
    required,
    text_of,
    tokens_of,
    word,
    word_of,
    write_struct,
)

ENGINES: HandleTable[Engine] = HandleTable(1, "engine")

_OPTIONS = "dsv4_engine_options"
# Members where 0 or NULL stands for the None of the dataclass.
_OPTIONAL = (
    *("context", "threads", "prefill_chunk", "ram_bytes", "vram_bytes", "expert_ram_bytes"),
    *("expert_freq", "draft_model", "dense_model", "expert_threads"),
)
_TEXTS = (
    *("device", "profile", "backend", "dtype", "draft_model", "dense_model"),
    *("cpu_experts", "expert_place", "expert_freq", "expert_verify", "io", "prefetch"),
)
_FLAGS = ("pin_threads", "verify", "sigbus_guard")


def engine_of(handle: Any) -> Engine:
    """The engine of a handle."""
    return ENGINES.get(int(ffi.cast("uintptr_t", handle)))


def _default_options() -> Any:
    """The defaults of `EngineOptions` as a struct."""
    struct = ffi.new(f"{_OPTIONS} *")
    struct.struct_size = ffi.sizeof(_OPTIONS)
    for field in dataclasses.fields(EngineOptions):
        value = getattr(EngineOptions(), field.name)
        if value is not None:
            setattr(struct, field.name, word(value) if isinstance(value, str) else value)
    return struct


_DEFAULTS = _default_options()


def options_of(pointer: Any) -> EngineOptions:
    """Engine options of a struct, or the defaults for NULL."""
    if not pointer:
        return EngineOptions()
    struct = read_struct(pointer, _OPTIONS, _DEFAULTS)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(EngineOptions):
        value = getattr(struct, field.name)
        if field.name in _TEXTS:
            value = word_of(value, field.name) if value else None
        elif field.name in _FLAGS:
            value = bool(value)
        if field.name in _OPTIONAL and not value:
            value = None
        values[field.name] = value
    return EngineOptions(**values)


class _LogHandler(logging.Handler):
    """Hands log lines to the callback of the host."""

    def __init__(self, callback: Any, user: Any, level: int) -> None:
        super().__init__(level)
        self._callback = callback
        self._user = user
        self._has_ended = False

    def end(self) -> None:
        """Call no more; a line that another thread is handing out is waited for."""
        with self.lock or nullcontext():
            self._has_ended = True

    def emit(self, record: logging.LogRecord) -> None:
        # One line at a time: this runs under the lock of the handler.
        if self._has_ended:
            return
        text = ffi.new("char[]", self.format(record).encode("utf-8", "replace"))
        lib.entry_log(self._callback, self._user, record.levelno, text)


_root = logging.getLogger("edgedsv4")
_log_handlers: list[_LogHandler] = []


def silence_logs() -> None:
    """Keep log lines from stderr, where Python writes warnings as long as nobody takes them."""
    _root.addHandler(logging.NullHandler())
    _root.propagate = False


@exported
def dsv4_set_log(log: Any, user: Any, level: int) -> int:
    """Replace the log callback."""
    if log and level < 0:
        raise ConfigError(f"level must not be negative, found {level}", name="level")
    with suppress(IndexError):
        while True:
            handler = _log_handlers.pop()
            _root.removeHandler(handler)
            handler.end()
    if log:
        handler = _LogHandler(log, user, level)
        _log_handlers.append(handler)
        _root.addHandler(handler)
        # 0 would be the level of Python's own root.
        _root.setLevel(max(1, level))
    return 0


@exported
def dsv4_devices_json(buffer: Any, capacity: int, size: Any) -> int:
    """`devices`."""
    return put_json([dataclasses.asdict(device) for device in devices()], buffer, capacity, size)


@exported
def dsv4_inspect_json(path: Any, buffer: Any, capacity: int, size: Any) -> int:
    """`inspect_model`."""
    return put_json(inspect_model(path_of(path)).to_json(), buffer, capacity, size)


@exported
def dsv4_engine_options_init(options: Any, struct_size: int) -> int:
    """The defaults of `EngineOptions`."""
    required(options, "options").struct_size = checked_size(struct_size, _OPTIONS)
    write_struct(options, _OPTIONS, ffi.new(f"{_OPTIONS} *", _DEFAULTS[0]))
    return 0


@exported
def dsv4_plan_json(path: Any, options: Any, buffer: Any, capacity: int, size: Any) -> int:
    """`plan_model`."""
    plan = plan_model(path_of(path), options_of(options))
    return put_json(plan.to_json(), buffer, capacity, size)


@exported
def dsv4_engine_open(path: Any, options: Any, call: Any, out: Any) -> int:
    """`Engine.open`."""
    required(out, "out")[0] = ffi.NULL
    watched = Call(call)
    watched.check()
    engine = Engine.open(path_of(path), options_of(options), on_progress=watched.tell)
    out[0] = ffi.cast("dsv4_engine *", ENGINES.add(engine))
    return 0


@exported
def dsv4_engine_close(engine: Any) -> int:
    """`Engine.close`."""
    if engine:
        engine_of(engine).close()
        ENGINES.remove(int(ffi.cast("uintptr_t", engine)))
    return 0


@exported
def dsv4_engine_get_info(engine: Any, out: Any) -> int:
    """Facts of an engine."""
    opened = engine_of(engine)
    facts, memory, config = opened.describe(), opened.memory(), opened.config
    info = ffi.new("dsv4_engine_info *")
    info.vocab_size, info.num_layers = config.vocab_size, config.num_layers
    info.context, info.max_context = opened.context, config.max_context
    info.threads = facts["threads"]
    info.has_tokenizer = opened.has_tokenizer
    for name in ("bos_id", "eos_id", "pad_id"):
        value = getattr(opened.tokenizer if opened.has_tokenizer else config, name)
        setattr(info, name, -1 if value is None else value)
    info.identity = str(facts["identity_sha256"]).encode()
    info.variant = opened.variant.encode()
    info.weight_bytes = memory["mapped_weights"] + memory["mapped_experts"]
    info.budget_bytes = memory["budget"]
    write_struct(required(out, "out"), "dsv4_engine_info", info)
    return 0


@exported
def dsv4_engine_describe_json(engine: Any, buffer: Any, capacity: int, size: Any) -> int:
    """`Engine.describe`."""
    return put_json(engine_of(engine).describe(), buffer, capacity, size)


@exported
def dsv4_engine_memory_json(engine: Any, buffer: Any, capacity: int, size: Any) -> int:
    """`Engine.memory`."""
    return put_json(engine_of(engine).memory(), buffer, capacity, size)


@exported
def dsv4_tokenize(
    engine: Any, text: Any, match_special: int, tokens: Any, capacity: int, count: Any
) -> int:
    """`Tokenizer.encode`."""
    tokenizer = engine_of(engine).tokenizer
    found = tokenizer.encode(text_of(text, "text"), match_added=bool(match_special))
    return put_tokens(found, tokens, capacity, count)


@exported
def dsv4_detokenize(
    engine: Any,
    tokens: Any,
    count: int,
    show_special: int,
    buffer: Any,
    capacity: int,
    size: Any,
) -> int:
    """`Tokenizer.decode`."""
    tokenizer = engine_of(engine).tokenizer
    text = tokenizer.decode(tokens_of(tokens, count), show_control=bool(show_special))
    return put_text(text, buffer, capacity, size)


@exported
def dsv4_token_bytes(engine: Any, token: int, buffer: Any, capacity: int, size: Any) -> int:
    """`Tokenizer.token_bytes`."""
    return put_bytes(engine_of(engine).tokenizer.token_bytes(token), buffer, capacity, size)


@exported
def dsv4_special_token(engine: Any, text: Any, token: Any) -> int:
    """`Tokenizer.id_of`."""
    found = engine_of(engine).tokenizer.id_of(text_of(text, "text"))
    required(token, "token")[0] = -1 if found is None else found
    return 0


@exported
def dsv4_selftest(device: Any, call: Any, check: Any, user: Any) -> int:
    """`run_selftest`."""
    watched = Call(call)
    name = word_of(device, "device") if device else "auto"
    failed = 0
    for result in run_selftest(name):
        failed += not result.has_passed
        texts = [ffi.new("char[]", text.encode()) for text in (result.name, result.detail)]
        if check and lib.entry_check(check, user, texts[0], result.has_passed, texts[1]):
            raise CancelledError("cancelled by the callback")
        watched.tell("self test", result.index + 1, result.total)
    if failed:
        raise NumericError(f"{failed} checks of the self test failed on this machine")
    return 0
