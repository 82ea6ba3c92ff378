"""DeepSeek-V4 on one machine: open a model, keep a timeline, get a reply.

These names are the public API. Each is imported on first use, so that importing the package (and
`edgedsv4 --help`) loads neither torch nor a tokenizer, reads no environment and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgedsv4.config import EngineOptions as EngineOptions
    from edgedsv4.config import ModelConfig as ModelConfig
    from edgedsv4.config import SamplingOptions as SamplingOptions
    from edgedsv4.errors import BackendUnavailableError as BackendUnavailableError
    from edgedsv4.errors import BusyError as BusyError
    from edgedsv4.errors import CancelledError as CancelledError
    from edgedsv4.errors import CapacityError as CapacityError
    from edgedsv4.errors import ConfigError as ConfigError
    from edgedsv4.errors import ContextFullError as ContextFullError
    from edgedsv4.errors import DeviceLostError as DeviceLostError
    from edgedsv4.errors import Dsv4Error as Dsv4Error
    from edgedsv4.errors import ExpertReadError as ExpertReadError
    from edgedsv4.errors import FormatError as FormatError
    from edgedsv4.errors import NumericError as NumericError
    from edgedsv4.errors import ShapeError as ShapeError
    from edgedsv4.errors import SnapshotError as SnapshotError
    from edgedsv4.errors import StorageError as StorageError
    from edgedsv4.errors import UnsupportedModelError as UnsupportedModelError
    from edgedsv4.formats.expert_frequency import ExpertFrequency as ExpertFrequency
    from edgedsv4.formats.expert_frequency import read_expert_frequency as read_expert_frequency
    from edgedsv4.formats.expert_frequency import write_expert_frequency as write_expert_frequency
    from edgedsv4.formats.route_trace import RouteTrace as RouteTrace
    from edgedsv4.formats.route_trace import read_route_trace as read_route_trace
    from edgedsv4.formats.snapshot_file import SnapshotInfo as SnapshotInfo
    from edgedsv4.formats.snapshot_file import inspect_snapshot as inspect_snapshot
    from edgedsv4.runtime.benchmark import BenchOptions as BenchOptions
    from edgedsv4.runtime.benchmark import SpeedReading as SpeedReading
    from edgedsv4.runtime.benchmark import SpeedReport as SpeedReport
    from edgedsv4.runtime.benchmark import measure_speed as measure_speed
    from edgedsv4.runtime.convert import ConvertOptions as ConvertOptions
    from edgedsv4.runtime.convert import ConvertReport as ConvertReport
    from edgedsv4.runtime.convert import QuantizeOptions as QuantizeOptions
    from edgedsv4.runtime.convert import convert_model as convert_model
    from edgedsv4.runtime.convert import quantize_model as quantize_model
    from edgedsv4.runtime.device import DeviceInfo as DeviceInfo
    from edgedsv4.runtime.device import devices as devices
    from edgedsv4.runtime.engine import Engine as Engine
    from edgedsv4.runtime.expert_profile import ProfileOptions as ProfileOptions
    from edgedsv4.runtime.expert_profile import profile_experts as profile_experts
    from edgedsv4.runtime.inspection import Inspection as Inspection
    from edgedsv4.runtime.inspection import ModelText as ModelText
    from edgedsv4.runtime.inspection import inspect_model as inspect_model
    from edgedsv4.runtime.inspection import open_text as open_text
    from edgedsv4.runtime.inspection import plan_model as plan_model
    from edgedsv4.runtime.link_bench import LinkOptions as LinkOptions
    from edgedsv4.runtime.link_bench import measure_links as measure_links
    from edgedsv4.runtime.links import Links as Links
    from edgedsv4.runtime.links import MachineFacts as MachineFacts
    from edgedsv4.runtime.links import mount_of as mount_of
    from edgedsv4.runtime.memory_plan import MemoryPlan as MemoryPlan
    from edgedsv4.runtime.memory_plan import PlanItem as PlanItem
    from edgedsv4.runtime.pack_build import build_pack as build_pack
    from edgedsv4.runtime.pack_options import PackOptions as PackOptions
    from edgedsv4.runtime.pack_options import PackReport as PackReport
    from edgedsv4.runtime.pack_verify import PackInspection as PackInspection
    from edgedsv4.runtime.pack_verify import PackVerification as PackVerification
    from edgedsv4.runtime.pack_verify import inspect_pack as inspect_pack
    from edgedsv4.runtime.pack_verify import verify_pack as verify_pack
    from edgedsv4.runtime.replies import DoneEvent as DoneEvent
    from edgedsv4.runtime.replies import ReplyStep as ReplyStep
    from edgedsv4.runtime.route_replay import ReplayCounts as ReplayCounts
    from edgedsv4.runtime.route_replay import ReplayOptions as ReplayOptions
    from edgedsv4.runtime.route_replay import replay_routes as replay_routes
    from edgedsv4.runtime.route_replay import slots_of_share as slots_of_share
    from edgedsv4.runtime.sampler import Sampler as Sampler
    from edgedsv4.runtime.scoring import Score as Score
    from edgedsv4.runtime.scoring import save_all_logits as save_all_logits
    from edgedsv4.runtime.scoring import score_text as score_text
    from edgedsv4.runtime.scoring import top_logprobs as top_logprobs
    from edgedsv4.runtime.selftest import SelfTestResult as SelfTestResult
    from edgedsv4.runtime.selftest import run_selftest as run_selftest
    from edgedsv4.runtime.session import Session as Session
    from edgedsv4.runtime.shipped_models import DEFAULT_MODEL as DEFAULT_MODEL
    from edgedsv4.runtime.shipped_models import SHIPPED_MODELS as SHIPPED_MODELS
    from edgedsv4.runtime.shipped_models import ShippedModel as ShippedModel
    from edgedsv4.runtime.stats import DraftStats as DraftStats
    from edgedsv4.runtime.stats import ExpertStats as ExpertStats
    from edgedsv4.runtime.stats import StepStats as StepStats
    from edgedsv4.runtime.stats import SyncReport as SyncReport
    from edgedsv4.runtime.synthetic_bench import measure_synthetic as measure_synthetic
    from edgedsv4.runtime.synthetic_options import SyntheticOptions as SyntheticOptions
    from edgedsv4.runtime.synthetic_prediction import Expectation as Expectation
    from edgedsv4.runtime.synthetic_report import KernelTime as KernelTime
    from edgedsv4.runtime.synthetic_report import SyntheticReading as SyntheticReading
    from edgedsv4.runtime.synthetic_report import SyntheticReport as SyntheticReport
    from edgedsv4.runtime.tier_plan import Tier as Tier
    from edgedsv4.runtime.tier_plan import TierPlan as TierPlan
    from edgedsv4.runtime.tier_report import Deviation as Deviation
    from edgedsv4.runtime.tier_report import Outcome as Outcome
    from edgedsv4.runtime.tier_report import TierReport as TierReport
    from edgedsv4.runtime.tier_report import compare as compare
    from edgedsv4.runtime.tier_report import limit_text as limit_text
    from edgedsv4.runtime.tier_report import plan_tiers as plan_tiers
    from edgedsv4.runtime.tier_speed import Prediction as Prediction
    from edgedsv4.text.chat_json import Chat as Chat
    from edgedsv4.text.chat_json import chat_from_json as chat_from_json
    from edgedsv4.text.chat_json import messages_from_json as messages_from_json
    from edgedsv4.text.messages import Message as Message
    from edgedsv4.text.messages import Piece as Piece
    from edgedsv4.text.messages import Prompt as Prompt
    from edgedsv4.text.messages import ToolCall as ToolCall
    from edgedsv4.text.prompt import PromptOptions as PromptOptions
    from edgedsv4.text.prompt import render_prompt as render_prompt
    from edgedsv4.text.reply import Reply as Reply
    from edgedsv4.text.reply import ReplyEvent as ReplyEvent
    from edgedsv4.text.reply import ReplyParser as ReplyParser
    from edgedsv4.text.reply import TextEvent as TextEvent
    from edgedsv4.text.reply import ThinkingEvent as ThinkingEvent
    from edgedsv4.text.reply import ToolCallEvent as ToolCallEvent
    from edgedsv4.text.tokenizer import Tokenizer as Tokenizer

__version__ = "0.1.0.dev0"

_HOME = {
    "edgedsv4.config": (
        "EngineOptions",
        "ModelConfig",
        "SamplingOptions",
    ),
    "edgedsv4.errors": (
        "BackendUnavailableError",
        "BusyError",
        "CancelledError",
        "CapacityError",
        "ConfigError",
        "ContextFullError",
        "DeviceLostError",
        "Dsv4Error",
        "ExpertReadError",
        "FormatError",
        "NumericError",
        "ShapeError",
        "SnapshotError",
        "StorageError",
        "UnsupportedModelError",
    ),
    "edgedsv4.formats.expert_frequency": (
        "ExpertFrequency",
        "read_expert_frequency",
        "write_expert_frequency",
    ),
    "edgedsv4.formats.route_trace": (
        "RouteTrace",
        "read_route_trace",
    ),
    "edgedsv4.runtime.expert_profile": (
        "ProfileOptions",
        "profile_experts",
    ),
    "edgedsv4.runtime.route_replay": (
        "ReplayCounts",
        "ReplayOptions",
        "replay_routes",
        "slots_of_share",
    ),
    "edgedsv4.formats.snapshot_file": (
        "SnapshotInfo",
        "inspect_snapshot",
    ),
    "edgedsv4.runtime.benchmark": (
        "BenchOptions",
        "SpeedReading",
        "SpeedReport",
        "measure_speed",
    ),
    "edgedsv4.runtime.convert": (
        "ConvertOptions",
        "ConvertReport",
        "QuantizeOptions",
        "convert_model",
        "quantize_model",
    ),
    "edgedsv4.runtime.device": (
        "DeviceInfo",
        "devices",
    ),
    "edgedsv4.runtime.engine": ("Engine",),
    "edgedsv4.runtime.inspection": (
        "Inspection",
        "ModelText",
        "inspect_model",
        "open_text",
        "plan_model",
    ),
    "edgedsv4.runtime.link_bench": (
        "LinkOptions",
        "measure_links",
    ),
    "edgedsv4.runtime.links": (
        "Links",
        "MachineFacts",
        "mount_of",
    ),
    "edgedsv4.runtime.memory_plan": (
        "MemoryPlan",
        "PlanItem",
    ),
    "edgedsv4.runtime.pack_build": ("build_pack",),
    "edgedsv4.runtime.pack_options": (
        "PackOptions",
        "PackReport",
    ),
    "edgedsv4.runtime.pack_verify": (
        "PackInspection",
        "PackVerification",
        "inspect_pack",
        "verify_pack",
    ),
    "edgedsv4.runtime.scoring": (
        "Score",
        "save_all_logits",
        "score_text",
        "top_logprobs",
    ),
    "edgedsv4.runtime.replies": (
        "DoneEvent",
        "ReplyStep",
    ),
    "edgedsv4.runtime.sampler": ("Sampler",),
    "edgedsv4.runtime.selftest": (
        "SelfTestResult",
        "run_selftest",
    ),
    "edgedsv4.runtime.session": ("Session",),
    "edgedsv4.runtime.shipped_models": (
        "DEFAULT_MODEL",
        "SHIPPED_MODELS",
        "ShippedModel",
    ),
    "edgedsv4.runtime.stats": (
        "DraftStats",
        "ExpertStats",
        "StepStats",
        "SyncReport",
    ),
    "edgedsv4.runtime.synthetic_bench": ("measure_synthetic",),
    "edgedsv4.runtime.synthetic_options": ("SyntheticOptions",),
    "edgedsv4.runtime.synthetic_prediction": ("Expectation",),
    "edgedsv4.runtime.synthetic_report": (
        "KernelTime",
        "SyntheticReading",
        "SyntheticReport",
    ),
    "edgedsv4.runtime.tier_plan": (
        "Tier",
        "TierPlan",
    ),
    "edgedsv4.runtime.tier_report": (
        "Deviation",
        "Outcome",
        "TierReport",
        "compare",
        "limit_text",
        "plan_tiers",
    ),
    "edgedsv4.runtime.tier_speed": ("Prediction",),
    "edgedsv4.text.chat_json": (
        "Chat",
        "chat_from_json",
        "messages_from_json",
    ),
    "edgedsv4.text.messages": (
        "Message",
        "Piece",
        "Prompt",
        "ToolCall",
    ),
    "edgedsv4.text.prompt": (
        "PromptOptions",
        "render_prompt",
    ),
    "edgedsv4.text.reply": (
        "Reply",
        "ReplyEvent",
        "ReplyParser",
        "TextEvent",
        "ThinkingEvent",
        "ToolCallEvent",
    ),
    "edgedsv4.text.tokenizer": ("Tokenizer",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


if not TYPE_CHECKING:
    # Hidden from type checkers, which would otherwise accept any name.
    def __getattr__(name: str) -> object:
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module 'edgedsv4' has no attribute {name!r}")
        value = getattr(importlib.import_module(module), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})


__all__ = [
    "DEFAULT_MODEL",
    "SHIPPED_MODELS",
    "BackendUnavailableError",
    "BenchOptions",
    "BusyError",
    "CancelledError",
    "CapacityError",
    "Chat",
    "ConfigError",
    "ContextFullError",
    "ConvertOptions",
    "ConvertReport",
    "Deviation",
    "DeviceInfo",
    "DeviceLostError",
    "DoneEvent",
    "DraftStats",
    "Dsv4Error",
    "Engine",
    "EngineOptions",
    "ExpertFrequency",
    "ExpertReadError",
    "ExpertStats",
    "FormatError",
    "Inspection",
    "KernelTime",
    "LinkOptions",
    "Links",
    "MachineFacts",
    "MemoryPlan",
    "Message",
    "ModelConfig",
    "ModelText",
    "NumericError",
    "Outcome",
    "PackInspection",
    "PackOptions",
    "PackReport",
    "PackVerification",
    "Piece",
    "PlanItem",
    "Prediction",
    "ProfileOptions",
    "Prompt",
    "PromptOptions",
    "QuantizeOptions",
    "ReplayCounts",
    "ReplayOptions",
    "Reply",
    "ReplyEvent",
    "ReplyParser",
    "ReplyStep",
    "RouteTrace",
    "Sampler",
    "SamplingOptions",
    "Score",
    "Session",
    "ShapeError",
    "ShippedModel",
    "SnapshotError",
    "SnapshotInfo",
    "SpeedReading",
    "SpeedReport",
    "StepStats",
    "StorageError",
    "SyncReport",
    "SyntheticOptions",
    "SyntheticReading",
    "SyntheticReport",
    "TextEvent",
    "ThinkingEvent",
    "Tier",
    "TierPlan",
    "TierReport",
    "Tokenizer",
    "ToolCall",
    "ToolCallEvent",
    "UnsupportedModelError",
    "__version__",
    "build_pack",
    "chat_from_json",
    "compare",
    "convert_model",
    "inspect_model",
    "inspect_pack",
    "inspect_snapshot",
    "limit_text",
    "measure_links",
    "measure_speed",
    "measure_synthetic",
    "messages_from_json",
    "mount_of",
    "open_text",
    "plan_model",
    "plan_tiers",
    "profile_experts",
    "quantize_model",
    "read_expert_frequency",
    "read_route_trace",
    "render_prompt",
    "replay_routes",
    "save_all_logits",
    "score_text",
    "slots_of_share",
    "top_logprobs",
    "verify_pack",
    "write_expert_frequency",
]
