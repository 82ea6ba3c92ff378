"""The model that the C kernels compute: the same network, the same promises, every bit in place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numeric
import pytest
import torch
from memory_model import chunk_sizes, evaluate, ids_tensor, model_of, state_of
from random_configs import draw_case
from selections import ForcedSelections
from tiny_model import random_tensors, random_tokens, tiny_config, write_gguf

from edgedsv4.errors import CancelledError, ConfigError, ShapeError
from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.kernels.native.library import library
from edgedsv4.model.hooks import ForwardHooks
from edgedsv4.model.kv_cache import KvCache, Numerics
from edgedsv4.model.model import Model
from edgedsv4.model.native_model import DK_SMALL_TOKENS, NativeModel
from edgedsv4.model.weights import ExpertWeights, load_weights
from edgedsv4.runtime.memory_plan import workspace_bytes

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig, Profile
    from edgedsv4.model.moe import ExpertSource

CONFIG = tiny_config(num_draft_layers=1)
SEED = 12
PROFILES: tuple[Profile, ...] = ("exact", "default")


def loaded(path: Path, kind: type[Model], profile: Profile, **options: int) -> Model:
    checkpoint = open_checkpoint(path)
    weights, experts = load_weights(checkpoint)
    numerics = Numerics(profile=profile, dtype=torch.float32, device=torch.device("cpu"))
    return kind(checkpoint.config, weights, experts, numerics, **options)


@pytest.fixture(scope="module", params=["a", "b"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose weights have llama.cpp's types (a: Q8_0, MXFP4, BF16) or those of ds4 (b)."""
    folder: Path = tmp_path_factory.mktemp("native")
    # Every width is a multiple of 256, as K blocks need.
    config = tiny_config(
        num_draft_layers=1,
        hidden_size=256,
        q_lora_rank=256,
        head_dim=128,
        output_lora_rank=128,
        expert_width=256,
    )
    write_gguf(folder / "m.gguf", config, random_tensors(config, SEED), types=request.param)
    return folder / "m.gguf"


@pytest.fixture(params=PROFILES)
def profile(request: pytest.FixtureRequest) -> Profile:
    name: Profile = request.param
    return name


def tokens(model: Model, count: int, seed: int = SEED) -> torch.Tensor:
    return ids_tensor(random_tokens(model.config, count, seed))


def run(model: Model, sizes: Sequence[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    cache = model.new_cache(sum(sizes))
    token_ids = random_tokens(model.config, sum(sizes), SEED)
    logits = evaluate(model, token_ids, cache=cache, sizes=sizes)
    return logits, state_of(model, cache)


def assert_same(
    got: tuple[torch.Tensor, dict[str, torch.Tensor]],
    expected: tuple[torch.Tensor, dict[str, torch.Tensor]],
) -> None:
    numeric.assert_same_bits("logits", got[0], expected[0])
    assert got[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        numeric.assert_same_bits(name, got[1][name], values)


# ---- the same network ----


@pytest.mark.parametrize("seed", range(8))
def test_random_shapes_agree_with_float64(seed: int) -> None:
    """Selections are recorded in float64 and forced, so that only near ties may differ."""
    case = draw_case(seed)
    tensors = random_tensors(case.config, seed)
    count = min(case.token_count, 200)
    token_ids = random_tokens(case.config, count, seed)
    topk: dict[int, torch.Tensor] = {}
    experts: dict[int, torch.Tensor] = {}
    wide = model_of(case.config, tensors, dtype=torch.float64)
    expected = evaluate(
        wide,
        token_ids,
        hooks=ForwardHooks(
            on_topk=lambda layer, _scores, ids: topk.setdefault(layer, ids),
            on_experts=lambda layer, _scores, ids: experts.setdefault(layer, ids),
        ),
    )
    forced = ForcedSelections(topk, experts)
    native = model_of(case.config, tensors, backend="native")
    got = evaluate(native, token_ids, hooks=forced.hooks())
    assert all(flip.is_near_tie for flip in forced.flips)
    numeric.assert_logits("logits", got, expected, 2e-4, top1=False)


def test_default_profile_stays_close_to_torch(path: Path) -> None:
    """Int8 activations cost little; the rounding of one row to FP8 more than that."""
    reference, native = loaded(path, Model, "default"), loaded(path, NativeModel, "default")
    expected, _ = run(reference, [60])
    got, _ = run(native, [60])
    assert numeric.mean_kl(expected, got) < 0.02


def test_exact_profile_agrees_with_torch(path: Path) -> None:
    reference, native = loaded(path, Model, "exact"), loaded(path, NativeModel, "exact")
    numeric.assert_logits("logits", run(native, [60])[0], run(reference, [60])[0], 2e-4)


# ---- the same bits ----


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(chunk_sizes(150, DK_SMALL_TOKENS), id="largest small chunks"),
        pytest.param([3, 13, 1, 7, 16, 2, 5, 4] * 2 + [16, 16, 16], id="odd chunks"),
        pytest.param([4] * 37 + [2], id="4"),
    ],
)
def test_small_chunks_give_the_bits_of_one_by_one(
    path: Path, profile: Profile, sizes: list[int]
) -> None:
    model = loaded(path, NativeModel, profile)
    assert_same(run(model, sizes), run(model, [1] * sum(sizes)))


def test_chunks_of_any_size_give_the_same_bits_without_int8(path: Path) -> None:
    model = loaded(path, NativeModel, "exact")
    assert_same(run(model, [100, 17, 33]), run(model, [1] * 150))


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("sizes", [[140, 10], [1] * 60], ids=["prefill", "decode"])
def test_any_number_of_threads_gives_the_same_bits(
    path: Path, profile: Profile, threads: int, sizes: list[int]
) -> None:
    model = loaded(path, NativeModel, profile, threads=threads)
    assert_same(run(model, sizes), run(loaded(path, NativeModel, profile), sizes))


def test_threads_that_keep_to_a_cpu_give_the_same_bits(path: Path) -> None:
    model = loaded(path, NativeModel, "default", threads=2, is_pinned=True)
    assert_same(run(model, [20, 1, 1]), run(loaded(path, NativeModel, "default"), [20, 1, 1]))


def test_the_draft_block_gives_the_bits_of_one_by_one(path: Path, profile: Profile) -> None:
    model = loaded(path, NativeModel, profile)
    ids = tokens(model, 41)
    streams = model.forward(ids[:-1], model.new_cache(40), logits="none").streams

    def draft(sizes: list[int]) -> torch.Tensor:
        cache = model.new_draft_cache(40)
        parts = zip(streams.split(sizes), ids[1:].split(sizes), strict=True)
        results = [model.forward_draft(s, i, cache, logits="all") for s, i in parts]
        return torch.cat([r.logits for r in results if r.logits is not None])

    numeric.assert_same_bits("logits", draft([16, 5, 3, 16]), draft([1] * 40))


def test_last_logits_are_the_last_of_all(path: Path, profile: Profile) -> None:
    model = loaded(path, NativeModel, profile)
    ids = tokens(model, 9)
    whole = model.forward(ids, model.new_cache(9), logits="all").logits
    last = model.forward(ids, model.new_cache(9)).logits
    assert whole is not None
    assert last is not None
    numeric.assert_same_bits("last row", last, whole[-1:])


def test_timelines_in_two_threads_do_not_meet(path: Path, profile: Profile) -> None:
    model = loaded(path, NativeModel, profile, threads=2)
    sizes = [[40, *[1] * 30], [1] * 70]
    expected = [run(model, each) for each in sizes]
    found: list[list[tuple[torch.Tensor, dict[str, torch.Tensor]]]] = [[], []]

    def work(place: int) -> None:
        found[place].extend(run(model, sizes[place]) for _ in range(4))

    workers = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for place in range(2):
        assert len(found[place]) == 4
        for got in found[place]:
            assert_same(got, expected[place])


class MovingExperts:
    """Experts that lie somewhere else after every fetch; what was fetched before becomes NaN."""

    is_resident = False

    def __init__(self, source: ExpertSource) -> None:
        self._source = source
        self._lent = threading.local()

    def check_unchanged(self) -> None:
        raise AssertionError("only those who keep experts ask")

    def fetch(self, layer: int, expert_ids: Sequence[int]) -> list[ExpertWeights]:
        for matrix in getattr(self._lent, "matrices", ()):
            matrix.data.fill_(0xFF)
        experts = [self._copy(expert) for expert in self._source.fetch(layer, expert_ids)]
        self._lent.matrices = [m for e in experts for m in (e.w1, e.w2, e.w3)]
        return experts

    @staticmethod
    def _copy(expert: ExpertWeights) -> ExpertWeights:
        parts = {}
        for name in ("w1", "w3", "w2"):
            matrix = getattr(expert, name)
            kept = {f: getattr(matrix, f) for f in matrix.__slots__}
            parts[name] = type(matrix)(**{**kept, "data": matrix.data.clone()})
        return ExpertWeights(**parts)


def test_experts_may_lie_elsewhere_in_every_layer(path: Path, profile: Profile) -> None:
    model = loaded(path, NativeModel, profile)
    moving = NativeModel(model.config, model.weights, MovingExperts(model.experts), model.numerics)
    assert_same(run(moving, [30, 1, 1, 5]), run(model, [30, 1, 1, 5]))


# ---- hooks ----


def test_watching_changes_no_bit(path: Path, profile: Profile) -> None:
    model = loaded(path, NativeModel, profile)
    seen: list[tuple[str, int, tuple[int, ...]]] = []

    def watch(kind: str) -> Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]:
        def keep(layer: int, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            seen.append((kind, layer, tuple(scores.shape)))
            return ids

        return keep

    hooks = ForwardHooks(on_topk=watch("rows"), on_experts=watch("experts"))
    plain = model.forward(tokens(model, 60), model.new_cache(60), logits="all").logits
    watched = model.forward(tokens(model, 60), model.new_cache(60), logits="all", hooks=hooks)
    assert plain is not None
    assert watched.logits is not None
    numeric.assert_same_bits("logits", watched.logits, plain)
    experts = [("experts", layer, (60, 8)) for layer in range(5)]
    rows = [("rows", layer, (60, 15)) for layer in (1, 3)]
    assert sorted(seen) == sorted(experts + rows)


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        (ForwardHooks(on_topk=lambda _layer, _scores, ids: ids + 15), "on_topk must give"),
        (ForwardHooks(on_experts=lambda _layer, _scores, ids: ids + 8), "on_experts must give"),
        (ForwardHooks(on_experts=lambda _layer, _scores, ids: ids[:, :2]), "on_experts must give"),
    ],
)
def test_a_hook_that_gives_what_does_not_exist_is_refused(
    path: Path, hooks: ForwardHooks, message: str
) -> None:
    model = loaded(path, NativeModel, "exact")
    cache = model.new_cache(60)
    with pytest.raises(ConfigError, match=message):
        model.forward(tokens(model, 60), cache, hooks=hooks)
    assert cache.length == 0


# ---- what goes wrong changes nothing ----


def stored(model: Model, cache: KvCache) -> dict[str, torch.Tensor]:
    return {name: values.clone() for name, values in state_of(model, cache).items()}


def begun(model: Model) -> tuple[KvCache, dict[str, torch.Tensor]]:
    cache = model.new_cache(512)
    model.forward(tokens(model, 131), cache)
    return cache, stored(model, cache)


def assert_unchanged(model: Model, cache: KvCache, before: dict[str, torch.Tensor]) -> None:
    assert cache.length == 131
    for name, values in stored(model, cache).items():
        numeric.assert_same_bits(name, values, before[name])


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_cancelled_forward_leaves_the_state_as_it_was(
    path: Path, profile: Profile, layers: int
) -> None:
    model = loaded(path, NativeModel, profile)
    cache, before = begun(model)
    done: list[int] = []

    def count(layer: int, _scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        done.append(layer)
        return ids

    hooks = ForwardHooks(on_experts=count, should_stop=lambda: len(done) >= layers)
    with pytest.raises(CancelledError):
        model.forward(tokens(model, 200, seed=2), cache, hooks=hooks)
    assert len(done) == layers
    assert_unchanged(model, cache, before)
    again = model.forward(tokens(model, 9, seed=3), cache).logits
    fresh, _ = begun(model)
    expected = model.forward(tokens(model, 9, seed=3), fresh).logits
    assert again is not None
    assert expected is not None
    numeric.assert_same_bits("logits after a cancel", again, expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_at_work_ask_whether_to_stop(path: Path, threads: int) -> None:
    model = loaded(path, NativeModel, "default", threads=threads)
    assert isinstance(model, NativeModel)
    cache, before = begun(model)
    asked: list[bool] = []

    def should_stop() -> bool:
        asked.append(True)
        return len(asked) > 1  # the first time is before the kernels begin

    model._free[0].run.cdata.last_poll_ns = 1  # long ago
    with pytest.raises(CancelledError):
        model.forward(tokens(model, 200), cache, hooks=ForwardHooks(should_stop=should_stop))
    assert len(asked) == 2
    assert_unchanged(model, cache, before)
    assert model.forward(tokens(model, 3), cache).logits is not None


def test_ctrl_c_inside_the_kernels_leaves_the_state_as_it_was(path: Path) -> None:
    model = loaded(path, NativeModel, "default")
    assert isinstance(model, NativeModel)
    cache, before = begun(model)
    asked: list[bool] = []

    def interrupt() -> bool:
        asked.append(True)
        if len(asked) > 1:
            raise KeyboardInterrupt
        return False

    model._free[0].run.cdata.last_poll_ns = 1  # long ago
    with pytest.raises(KeyboardInterrupt):
        model.forward(tokens(model, 200), cache, hooks=ForwardHooks(should_stop=interrupt))
    assert_unchanged(model, cache, before)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([0, 384], "found 384"), ([-1], "found -1"), (list(range(9)), "exceed the capacity 8")],
)
def test_tokens_that_cannot_be_evaluated_are_refused(
    path: Path, ids: list[int], message: str
) -> None:
    model = loaded(path, NativeModel, "exact")
    cache = model.new_cache(8)
    with pytest.raises(ConfigError, match=message):
        model.forward(torch.tensor(ids), cache)
    assert cache.length == 0


def test_a_timeline_of_another_model_is_refused(path: Path) -> None:
    model, other = (loaded(path, NativeModel, "exact") for _ in range(2))
    with pytest.raises(ConfigError, match="another model"):
        model.forward(tokens(model, 3), other.new_cache(8))
    with pytest.raises(ConfigError, match="another model"):
        model.forward(tokens(model, 3), model.new_draft_cache(8))


def test_streams_of_another_shape_are_refused(path: Path) -> None:
    model = loaded(path, NativeModel, "exact")
    ids = tokens(model, 3)
    with pytest.raises(ShapeError, match="for 3 tokens"):
        model.forward_draft(torch.zeros(2, 4, 256), ids, model.new_draft_cache(8))


def test_a_model_without_draft_block_says_so() -> None:
    config = tiny_config(compress_ratios=(0,), num_hash_layers=0)
    model = model_of(config, random_tensors(config, 1), backend="native")
    with pytest.raises(ConfigError, match="no MTP block"):
        model.new_draft_cache(8)


def test_the_last_token_of_the_capacity_fits(path: Path, profile: Profile) -> None:
    model = loaded(path, NativeModel, profile)
    cache = model.new_cache(131)
    for part in tokens(model, 131).split(50):
        model.forward(part, cache)
    assert cache.length == cache.capacity


# ---- memory ----


@pytest.mark.parametrize("chunk", [1, 16, 64, 256, 2048])
@pytest.mark.parametrize("seed", range(6))
def test_working_memory_is_within_the_plan(seed: int, chunk: int) -> None:
    config = draw_case(seed).config
    model = model_of(config, random_tensors(config, seed), backend="native")
    assert isinstance(model, NativeModel)
    assert needed_bytes(model, config, chunk) <= workspace_bytes(config, chunk, "f32")


def needed_bytes(model: NativeModel, config: ModelConfig, chunk: int) -> int:
    """Bytes of working memory, streams and one row of logits late in a timeline."""
    lib, _ = library()
    cache = model.new_cache(16)
    keys, staged = 32_768 // 4, cache.staged_bytes
    nbytes: int = lib.dk_workspace_bytes(model.network.cdata, chunk, keys, staged, 2)
    streams = chunk * config.hc_streams * config.hidden_size * 4
    return nbytes + nbytes // 16 + 2 * streams + 4 * config.vocab_size


def test_experts_another_thread_has_set_stay_as_they_are(path: Path) -> None:
    model = loaded(path, NativeModel, "exact")
    assert isinstance(model, NativeModel)
    _, ffi = library()
    records = ffi.new("dk_matrix[]", 3 * model.config.num_experts)
    first, other = model.experts.fetch(0, [0, 1])
    model.network.set_experts(records, [0], [first], is_shared=True)
    address = records[0].data
    # A thread that paused for the same expert comes second, while a kernel may read the first.
    model.network.set_experts(records, [0], [other], is_shared=True)
    assert records[0].data == address
    model.network.set_experts(records, [0], [other], is_shared=False)
    assert records[0].data != address
