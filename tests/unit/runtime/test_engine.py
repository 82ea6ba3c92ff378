"""Opening, sessions, budgets and closing of an engine, on the real tiny model."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from edgedsv4.config import EngineOptions, SamplingOptions
from edgedsv4.errors import (
    BackendUnavailableError,
    BusyError,
    CapacityError,
    ConfigError,
    Dsv4Error,
    FormatError,
)
from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.runtime.engine import Engine
from edgedsv4.runtime.memory_plan import StateLayout
from edgedsv4.runtime.random_model import build_random_model
from edgedsv4.runtime.replies import DoneEvent
from edgedsv4.runtime.shipped_models import RANDOM_TINY, SHIPPED_MODELS
from edgedsv4.text.messages import Message
from edgedsv4.text.prompt import PromptOptions

OPTIONS = EngineOptions(threads=1, context=600, prefill_chunk=64)
PLAIN = PromptOptions(thinking="none")


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    build_random_model(path)
    return path


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with Engine.open(path, OPTIONS) as engine:
        yield engine


def variant_of(options: EngineOptions = OPTIONS, **changes: object) -> EngineOptions:
    values = {name: getattr(options, name) for name in options.__slots__}
    return EngineOptions(**{**values, **changes})


def test_reply_of_the_real_model_is_reproducible(engine: Engine) -> None:
    def run() -> tuple[str, str]:
        with engine.new_session() as session:
            options = SamplingOptions(seed=4, max_tokens=12)
            *_, done = session.reply([Message("user", "Hi")], options, prompt=PLAIN)
            assert isinstance(done, DoneEvent)
            return done.reply.text, done.finish_reason

    assert run() == run()


def test_second_turn_reuses_the_whole_first(engine: Engine) -> None:
    with engine.new_session() as session:
        messages = [Message("user", "Hi")]
        options = SamplingOptions(seed=4, max_tokens=12)
        *_, done = session.reply(messages, options, prompt=PLAIN)
        assert isinstance(done, DoneEvent)
        before = session.token_ids
        messages += [Message("assistant", done.reply.text), Message("user", "More")]
        *_, done = session.reply(messages, options, prompt=PLAIN)
        assert isinstance(done, DoneEvent)
        assert done.report.reused == len(before)


def test_rewind_and_on_equals_never_rewound(engine: Engine) -> None:
    ids = np.random.default_rng(1).integers(3, 259, 330).tolist()
    with engine.new_session() as session, engine.new_session() as fresh:
        session.sync(ids[:40])
        session.sync([*ids[:300], 5, 6, 7])
        report = session.sync(ids)
        assert (report.reused, report.evaluated, report.rebuilt) == (300, 30, 0)
        fresh.sync(ids)
        np.testing.assert_allclose(session.logits(), fresh.logits(), atol=1e-4)


@pytest.mark.parametrize("profile", ["exact", "default"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_cache_takes_exactly_the_planned_bytes(path: Path, profile: str, dtype: str) -> None:
    options = variant_of(profile=profile, dtype=dtype)
    with Engine.open(path, options) as engine, engine.new_session(context=333) as session:
        layout = StateLayout(engine.config, options.profile, options.dtype)
        assert session.nbytes() == layout.state_bytes(333)


def test_checkpoint_takes_at_most_the_planned_bytes(engine: Engine) -> None:
    layout = StateLayout(engine.config)
    with engine.new_session() as session:
        for length in (3, 127, 130, 259, 511):
            before = session.checkpoint_nbytes()
            session.sync([3 + i % 200 for i in range(length)])
            assert session.checkpoint_nbytes() - before <= layout.checkpoint_bytes


def test_random_name_opens_says_so_and_leaves_nothing_behind() -> None:
    engine = Engine.open(RANDOM_TINY, OPTIONS)
    description = engine.describe()
    assert description["notes"] == [SHIPPED_MODELS[RANDOM_TINY].note]
    folder = Path(str(description["path"])).parent
    assert folder.is_dir()
    engine.close()
    assert not folder.exists()


def test_describe_is_json_and_names_what_runs(engine: Engine, path: Path) -> None:
    found = json.loads(json.dumps(engine.describe()))
    assert found["path"] == str(path)
    assert (found["device"], found["threads"], found["variant"]) == ("cpu", 1, "v4")
    assert found["kernels"]["quant_matmul"] == "native"
    levels = ("scalar", "avx2", "avx-vnni", "avx512", "avx512-vnni", "amx", "neon", "neon-dotprod")
    assert found["instruction_set"] in levels
    assert found["notes"] == []


def test_progress_ends_complete(path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    options = variant_of(verify=True)
    with Engine.open(path, options, on_progress=lambda *step: seen.append(step)):
        assert seen[0] == ("open model", 0, 4)
        assert seen[-1] == ("open model", 4, 4)
        verified = [step for step in seen if step[0] == "verify"]
        assert verified[-1][1] == verified[-1][2]


def test_missing_file_is_a_format_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such file"):
        Engine.open(tmp_path / "absent.gguf", OPTIONS)


@pytest.mark.parametrize("device", ["cuda:99", "mps", "gpu", "cuda:-1"])
def test_unusable_device_names_what_there_is(path: Path, device: str) -> None:
    with pytest.raises(BackendUnavailableError, match="there is: auto, cpu"):
        Engine.open(path, variant_of(device=device))


@pytest.mark.parametrize("changes", [{"backend": "triton"}, {"backend": "native", "dtype": "f64"}])
def test_backend_that_cannot_run_is_refused_at_open(path: Path, changes: dict[str, str]) -> None:
    with pytest.raises(BackendUnavailableError, match=changes["backend"]):
        Engine.open(path, variant_of(**changes))


def test_budget_too_small_for_the_model_is_refused(path: Path) -> None:
    with pytest.raises(CapacityError, match="the memory ends in") as caught:
        Engine.open(path, variant_of(ram_bytes=1 << 20))
    assert caught.value.needed_bytes > caught.value.available_bytes == 1 << 20


def test_context_beyond_the_model_is_refused(path: Path, engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r"context must be 1\.\.65536"):
        Engine.open(path, variant_of(context=65_537))
    for context in (0, 65_537):
        with pytest.raises(ConfigError, match=f"found {context}"):
            engine.new_session(context=context)


def test_unasked_context_is_the_documented_default(path: Path) -> None:
    with Engine.open(path, variant_of(context=None)) as engine:
        assert engine.context == 32_768


def test_second_session_must_fit_beside_the_first(path: Path) -> None:
    with Engine.open(path, variant_of(context=None, ram_bytes=1 << 40)) as engine:
        found = engine.memory()
        state = StateLayout(engine.config).state_bytes(20_000)
    budget = found["workspace"] + found["mapped_weights"] + state * 3 // 2
    options = variant_of(context=None, ram_bytes=budget, checkpoint_bytes=0)
    with Engine.open(path, options) as engine:
        first = engine.new_session(context=20_000)
        with pytest.raises(CapacityError, match="other sessions"):
            engine.new_session(context=20_000)
        first.close()
        engine.new_session(context=20_000).close()


def test_memory_follows_the_sessions(engine: Engine) -> None:
    assert engine.memory()["sessions"] == 0
    with engine.new_session() as session:
        session.sync(list(range(3, 203)))
        found = engine.memory()
        layout = StateLayout(engine.config)
        assert found["kv_allocated"] == layout.state_bytes(600)
        assert found["kv_used"] == layout.state_bytes(200)
        assert found["checkpoints"] == session.checkpoint_nbytes() > 0
    assert engine.memory()["kv_allocated"] == 0


def test_weights_add_up_to_the_file(engine: Engine, path: Path) -> None:
    found = engine.memory()
    with open_checkpoint(path) as checkpoint:
        stored = sum(record.nbytes for record in checkpoint.tensors.values())
    assert found["mapped_weights"] + found["mapped_experts"] == stored
    assert 0 < found["resident_weights"] < found["mapped_weights"]


def test_close_with_a_live_session_is_refused(path: Path) -> None:
    engine = Engine.open(path, OPTIONS)
    session = engine.new_session()
    with pytest.raises(BusyError, match="1 sessions"):
        engine.close()
    session.close()
    engine.close()
    engine.close()


def test_with_block_closes_its_sessions(path: Path) -> None:
    with Engine.open(path, OPTIONS) as engine:
        session = engine.new_session()
    assert session.is_closed


def test_forgotten_session_does_not_keep_the_engine_open(path: Path) -> None:
    engine = Engine.open(path, OPTIONS)
    engine.new_session().sync([3, 4])
    engine.close()


def test_use_after_close_says_so(path: Path) -> None:
    engine = Engine.open(path, OPTIONS)
    engine.close()
    calls = (engine.new_session, engine.describe, engine.memory, lambda: engine.tokenizer)
    for call in calls:
        with pytest.raises(Dsv4Error, match="engine is closed"):
            call()


def test_file_touched_while_open_stops_the_next_step(engine: Engine, path: Path) -> None:
    with engine.new_session() as session:
        session.sync([3, 4, 5])
        os.utime(path, ns=(1, 1))
        with pytest.raises(FormatError, match="changed while open"):
            session.evaluate([6])
        assert session.token_ids == (3, 4, 5)


def test_file_that_changes_during_a_step_takes_that_step_back(engine: Engine, path: Path) -> None:
    with engine.new_session() as session:
        session.sync([3, 4, 5])
        forward = engine._live.model.forward

        def touching_forward(*args: object, **kwargs: object) -> object:
            result = forward(*args, **kwargs)  # type: ignore[arg-type]
            os.utime(path, ns=(1, 1))
            return result

        engine._live.model.forward = touching_forward  # type: ignore[method-assign,assignment]
        with pytest.raises(FormatError, match="changed while open"):
            session.evaluate([6])
        assert session.token_ids == (3, 4, 5)


def test_verify_names_tensor_row_and_block(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        record = checkpoint.tensors["blk.1.attn_kv.weight"]
        offset = record.offset + 2 * (3 * record.shape[1] + 5)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xc0\x7f")
    with pytest.raises(FormatError, match=r"tensor blk\.1\.attn_kv\.weight, row 3, block 5"):
        Engine.open(path, variant_of(verify=True))
    Engine.open(path, OPTIONS).close()


def test_verify_lists_every_bad_tensor(path: Path) -> None:
    names = ("blk.0.attn_q_a.weight", "blk.2.ffn_down_exps.weight", "output_norm.weight")
    with open_checkpoint(path) as checkpoint:
        places = [(checkpoint.tensors[n].offset, checkpoint.tensors[n].block_type) for n in names]
    with path.open("r+b") as file:
        for offset, block_type in places:
            file.seek(offset)
            file.write(b"\xc0\x7f" if block_type.name == "BF16" else b"\x00\x00\xc0\x7f")
    with pytest.raises(FormatError) as caught:
        Engine.open(path, variant_of(verify=True))
    assert len(caught.value.problems) == 3
    assert all(name in str(caught.value) for name in names)


def test_warnings_of_the_file_are_logged_once_and_kept_as_notes(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with path.open("ab") as file:
        file.write(b"trailing")
    with caplog.at_level(logging.WARNING), Engine.open(path, OPTIONS) as engine:
        notes = engine.describe()["notes"]
    assert isinstance(notes, list)
    assert len(notes) == 1
    assert sum(notes[0] in record.getMessage() for record in caplog.records) == 1


def test_threads_of_torch_are_set_for_the_process(path: Path) -> None:
    with Engine.open(path, variant_of(threads=2, backend="reference")):
        assert torch.get_num_threads() == 2


def test_threads_of_torch_stay_as_they_are_when_the_c_kernels_compute(path: Path) -> None:
    with Engine.open(path, variant_of(threads=2, backend="native")) as engine:
        assert torch.get_num_threads() == 1
        assert engine.describe()["threads"] == 2


def test_a_model_of_a_few_megabytes_takes_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgedsv4.runtime.opening.physical_cores", lambda: 3)
    with Engine.open("random-tiny", EngineOptions(context=64)) as engine:
        assert engine.describe()["threads"] == 1


def test_a_larger_model_takes_the_physical_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgedsv4.runtime.opening.physical_cores", lambda: 3)
    monkeypatch.setattr("edgedsv4.runtime.opening.ONE_THREAD_BYTES", 1000)
    with Engine.open("random-tiny", EngineOptions(context=64)) as engine:
        assert engine.describe()["threads"] == 3
    torch.set_num_threads(1)


def test_budget_that_bounds_nothing_is_announced() -> None:
    with Engine.open("random-tiny", EngineOptions(context=64, vram_bytes=1 << 30)) as engine:
        notes = engine.describe()["notes"]
    assert isinstance(notes, list)
    assert any("vram_bytes has no effect" in note for note in notes)


def test_budget_that_is_used_is_not_announced() -> None:
    with Engine.open("random-tiny", EngineOptions(context=64, ram_bytes=1 << 33)) as engine:
        notes = engine.describe()["notes"]
    assert isinstance(notes, list)
    assert not any("no effect" in note for note in notes)


def test_model_without_tokenizer_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgedsv4.runtime.random_model._add_tokenizer", lambda *_: None)
    build_random_model(tmp_path / "ids.gguf")
    with Engine.open(tmp_path / "ids.gguf", OPTIONS) as engine:
        assert not engine.has_tokenizer
        with pytest.raises(ConfigError, match="holds no tokenizer"):
            _ = engine.tokenizer


def test_model_with_tokenizer_says_so(engine: Engine) -> None:
    assert engine.has_tokenizer
    assert engine.tokenizer.encode("a")
