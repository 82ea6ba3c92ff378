"""The weights and constants of a model as the C kernels take them; made once, when it is opened.

Every record borrows: `NativeNetwork` keeps the tensors alive that its records point into. Only the
routed experts are set later, one by one, when a forward first needs them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from edgedsv4.kernels.native.library import (
    HAVE_NATIVE,
    WHY_NOT,
    fill_matrix,
    has_native_type,
    library,
    pointer,
)
from edgedsv4.kernels.rope import rope_frequencies
from edgedsv4.model.layer_plan import draft_plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from edgedsv4.config import ModelConfig
    from edgedsv4.kernels.quant_matmul import QuantMatrix
    from edgedsv4.model.kv_cache import Numerics
    from edgedsv4.model.layer_plan import LayerPlan, RopePlan
    from edgedsv4.model.weights import (
        AttentionWeights,
        DraftWeights,
        ExpertWeights,
        HyperWeights,
        LayerWeights,
        ModelWeights,
        MoeWeights,
    )

_PLAIN_FLOATS = ("F32", "F16", "BF16", "F64")
LARGEST_INDEX_DIM = 1024
"""Width of an index key that the C kernels can score."""
LARGEST_HEAD_DIM, LARGEST_COMPRESSED_DIM = 16384, 4096
"""Width of a key/value row that they can attend to, and that they can pool (`kernels.h`)."""


def native_obstacle(numerics: Numerics) -> str | None:
    """Why the C kernels cannot compute in this way, as the end of a sentence; None if they can."""
    if not HAVE_NATIVE:
        return WHY_NOT
    if numerics.device.type != "cpu":
        return f"the C kernels compute on the CPU, not on {numerics.device}"
    if numerics.dtype != torch.float32:
        return (
            f"the C kernels compute in float32, not in {str(numerics.dtype).removeprefix('torch.')}"
        )
    return None


def model_obstacle(config: ModelConfig, block_types: Iterable[str]) -> str | None:
    """Why the C kernels cannot compute a model, as the end of a sentence; None if they can.

    Args:
        config: shape of the model.
        block_types: names of all types that its matrices are stored in.
    """
    unknown = [name for name in block_types if not has_native_type(name)]
    if unknown:
        return f"the C kernels cannot read weights of type {', '.join(unknown)}"
    if 4 in config.compress_ratios and not 32 <= config.index_dim <= LARGEST_INDEX_DIM:
        return f"the C kernels score index keys of 32..{LARGEST_INDEX_DIM} dims"
    largest = LARGEST_COMPRESSED_DIM if any(config.compress_ratios) else LARGEST_HEAD_DIM
    if config.head_dim > largest:
        return f"the C kernels take heads of at most {largest} dims here, not {config.head_dim}"
    return None


def types_without_int8(block_types: Iterable[str]) -> list[str]:
    """Those quantized types whose products take float32 activations in every profile."""
    lib, _ = library()
    return [
        name
        for name in block_types
        if name not in _PLAIN_FLOATS and not lib.dk_type_has_int8(lib.dk_type_id(name.encode()))
    ]


def instruction_set() -> str:
    """Name of the CPU instructions that the C kernels use."""
    lib, ffi = library()
    name: bytes = ffi.string(lib.dk_isa_name(lib.dk_isa()))
    return name.decode()


class NativeLayers:
    """Records of consecutive layers: those of the main model, or the one of the draft block."""

    def __init__(
        self, network: NativeNetwork, weights: Sequence[LayerWeights], plans: Sequence[LayerPlan]
    ) -> None:
        _, ffi = library()
        self.plans = tuple(plans)
        self.weights = tuple(weights)
        self.count = len(self.plans)
        self.cdata = ffi.new("dk_layer[]", self.count)
        self.experts = tuple(
            ffi.new("dk_matrix[]", 3 * network.config.num_experts) for _ in self.plans
        )
        self._shared: list[Any] = []
        for index, (layer, plan) in enumerate(zip(weights, plans, strict=True)):
            record = self.cdata[index]
            record.ratio = plan.ratio
            record.rope = network.table_of(plan.rope)
            fill_hyper(record.hyper, layer.hc_attn, layer.attn_norm)
            _fill_attention(record, layer.attention)
            fill_hyper(record.ffn_hyper, layer.hc_ffn, layer.ffn_norm)
            self._fill_moe(record, layer.moe)
            record.experts.matrices = self.experts[index]
            network.fill_sizes(record.experts)
            record.experts.limit = plan.swiglu_limit
            record.experts.shared_limit = plan.shared_swiglu_limit

    def _fill_moe(self, record: Any, weights: MoeWeights) -> None:
        _, ffi = library()
        fill_matrix(record.router, weights.router)
        record.bias = pointer(weights.bias)
        record.table = pointer(weights.expert_table)
        matrices = (weights.shared_w1, weights.shared_w3, weights.shared_w2)
        if weights.shared_w1 is None:
            record.experts.shared = ffi.NULL
            return
        shared = ffi.new("dk_matrix[3]")
        for place, matrix in enumerate(matrices):
            if matrix is not None:
                fill_matrix(shared[place], matrix)
        self._shared.append(shared)
        record.experts.shared = shared


class NativeNetwork:
    """Everything of a model but what belongs to a timeline."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        plans: Sequence[LayerPlan],
        *,
        has_int8: bool,
    ) -> None:
        _, ffi = library()
        self.config = config
        self._weights = weights
        self._has_int8 = has_int8
        self._tables: dict[RopePlan, int] = {}
        self._frequencies: list[Tensor] = []
        self._lock = threading.Lock()
        self.cdata = ffi.new("dk_network *")
        self._fill_constants()
        fill_matrix(self.cdata.embed, weights.embed)
        fill_matrix(self.cdata.head, weights.head)
        self.main = NativeLayers(self, weights.layers, plans)
        self.head = _head(weights.hc_head, weights.norm)
        self.draft: NativeLayers | None = None
        self.draft_head = self.draft_entrance = ffi.NULL
        if weights.draft is not None:
            self._add_draft(weights.draft)

    def table_of(self, rope: RopePlan) -> int:
        """Place of a rotation's frequencies; at most two differ in a model."""
        if rope not in self._tables:
            place = len(self._tables)
            frequencies = rope_frequencies(self.config.rope_dim, rope.theta, rope.scaling)
            self._frequencies.append(frequencies.contiguous())
            self.cdata.frequencies[place] = pointer(self._frequencies[-1])
            self._tables[rope] = place
        return self._tables[rope]

    def fill_sizes(self, experts: Any) -> None:
        """Sizes of a `dk_experts` that all layers share."""
        config = self.config
        experts.experts = config.num_experts
        experts.width = config.expert_width
        experts.shared_width = config.num_shared_experts * config.expert_width
        experts.hidden = config.hidden_size
        experts.k = config.experts_per_token
        experts.has_int8 = self._has_int8

    def set_experts(
        self,
        records: Any,
        expert_ids: Sequence[int],
        experts: Sequence[ExpertWeights],
        *,
        is_shared: bool,
    ) -> None:
        """Describe experts in records.

        Args:
            records: of a layer, or of one forward alone.
            expert_ids: which ones.
            experts: their weights.
            is_shared: other threads may be reading the records. What another one has set meanwhile
                stays then: setting it again would take it away under a running kernel.
        """
        lib, ffi = library()
        three = ffi.new("dk_matrix[3]")
        with self._lock:
            for expert_id, expert in zip(expert_ids, experts, strict=True):
                if is_shared and records[3 * expert_id].data:
                    continue
                for place, matrix in enumerate((expert.w1, expert.w3, expert.w2)):
                    fill_matrix(three[place], matrix)
                lib.dk_set_expert(records + 3 * expert_id, three)

    def _fill_constants(self) -> None:
        config, cdata = self.config, self.cdata
        cdata.hidden = config.hidden_size
        cdata.heads = config.num_heads
        cdata.head_dim = config.head_dim
        cdata.rope_half = config.rope_dim // 2
        cdata.q_rank = config.q_lora_rank
        cdata.groups = config.output_groups
        cdata.group_rank = config.output_lora_rank
        cdata.window = config.window
        cdata.index_heads = config.index_heads if 4 in config.compress_ratios else 0
        cdata.index_dim = config.index_dim
        cdata.top = config.index_topk
        cdata.routed_scale = config.routed_scale
        cdata.norm_eps = config.rms_norm_eps
        cdata.hc_eps = config.hc_eps
        cdata.iterations = config.hc_sinkhorn_iterations
        cdata.has_int8 = self._has_int8
        self.fill_sizes(cdata.experts)

    def _add_draft(self, draft: DraftWeights) -> None:
        _, ffi = library()
        self.draft = NativeLayers(self, (draft.layer,), (draft_plan(self.config),))
        self.draft_head = _head(draft.hc_head, draft.norm)
        self.draft_entrance = ffi.new("dk_draft *")
        self.draft_entrance.token_norm = pointer(draft.enorm)
        self.draft_entrance.stream_norm = pointer(draft.hnorm)
        fill_matrix(self.draft_entrance.token_projection, draft.e_proj)
        fill_matrix(self.draft_entrance.stream_projection, draft.h_proj)


class DescribedExperts:
    """Records of experts that come and go, by where their bytes lie.

    Describing an expert takes 20 us, copying its record less than one. There are as many records
    as places that experts are put to, each with the expert that was there last.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[ExpertWeights, Any]] = {}

    def copy_to(self, records: Any, expert: ExpertWeights) -> None:
        """Put w1, w3, w2 of an expert into three records that no other thread reads."""
        _, ffi = library()
        place = expert.w1.data.data_ptr()
        known = self._known.get(place)
        if known is None or known[0] is not expert:
            three = ffi.new("dk_matrix[3]")
            for record, matrix in zip(three, (expert.w1, expert.w3, expert.w2), strict=True):
                fill_matrix(record, matrix)
            known = self._known[place] = expert, three
        ffi.memmove(records, known[1], ffi.sizeof("dk_matrix[3]"))


def fill_hyper(record: Any, hyper: HyperWeights, norm: Tensor) -> None:
    """Describe hyper-connection parameters, and the norm of what is read, in a `dk_hyper`."""
    fill_matrix(record.fn, hyper.fn)
    record.base = pointer(hyper.base)
    record.scale = pointer(hyper.scale)
    record.norm = pointer(norm)


def _head(hyper: HyperWeights, norm: Tensor) -> Any:
    _, ffi = library()
    record = ffi.new("dk_hyper *")
    fill_hyper(record, hyper, norm)
    return record


def _fill_attention(record: Any, weights: AttentionWeights) -> None:
    for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"):
        matrix: QuantMatrix = getattr(weights, name)
        fill_matrix(getattr(record, name), matrix)
    for name in ("q_norm", "kv_norm", "sink"):
        setattr(record, name, pointer(getattr(weights, name)))
    if weights.compressor is not None:
        fill_matrix(record.compressor[0], weights.compressor.wkv)
        fill_matrix(record.compressor[1], weights.compressor.wgate)
    if weights.indexer is not None:
        record.has_indexer = 1
        fill_matrix(record.index_compressor[0], weights.indexer.compressor.wkv)
        fill_matrix(record.index_compressor[1], weights.indexer.compressor.wgate)
        fill_matrix(record.index_wq_b, weights.indexer.wq_b)
        fill_matrix(record.index_weights, weights.indexer.weights_proj)
