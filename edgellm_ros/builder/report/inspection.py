# SPDX-License-Identifier: Apache-2.0
"""Inspects an engine directory: model, inputs and outputs of each graph, memory."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import DTYPES
from edgellm_ros.builder.quantization.matrix import QUANTIZED
from edgellm_ros.builder.report.memory import MemoryReport, memory_report, memory_rows
from edgellm_ros.builder.report.policy_rows import policy_rows
from edgellm_ros.builder.report.reports import AdapterReport, BindingReport, PartReport, PlanReport
from edgellm_ros.builder.weights.adapters import read_adapters
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensorrt.plan_file import TITLES, PlanFile, listed, read_plans
from edgellm_ros.engine_directory.adapters.adapter_folder import find_adapters
from edgellm_ros.engine_directory.adapters.lora_inputs import lora_inputs
from edgellm_ros.engine_directory.adapters.peft_adapter import PeftAdapter
from edgellm_ros.engine_directory.builder_config import BuilderConfig
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.draft_config import DFLASH, MTP, DraftConfig
from edgellm_ros.engine_directory.files import DRAFT, PREFIX, VERIFY, graph_path
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig
from edgellm_ros.engine_directory.parts import EngineParts
from edgellm_ros.multimodal.video_config import AS_TEXT
from edgellm_ros.multimodal.video_processor import VideoProcessor
from edgellm_ros.multimodal.vision_config import QwenVisionTower, VisionConfig

EXAMPLE_SIZE = 640, 480  # width and height of a camera's frame in pixels
TIMESTAMP_TOKENS = 9  # of "<12.5 seconds>", vision_start and vision_end with the tokenizer of Qwen3-VL
_FIRST_NUMBER = re.compile(r"(\D*)(\d*)(.*)")
PARTS = ("llm", VERIFY, "visual", "audio", PREFIX, "action", DRAFT)


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """All data that `edgellm inspect` shows."""

    directory: str
    config: EngineConfig
    parts: tuple[PartReport, ...]
    adapters: tuple[AdapterReport, ...]
    memory: MemoryReport
    verified: bool  # SHA-256 were compared, not only sizes
    without: tuple[str, ...] = ()  # parts that are not counted in `memory`

    @property
    def opened(self) -> tuple[PartReport, ...]:
        """The parts that are opened, which need memory."""
        return tuple(part for part in self.parts if part.name not in self.without)


def inspect(engine_dir: str | Path, verify: bool = False, without: Sequence[str] = ()) -> EngineReport:
    """Read an engine directory and check its files.

    Presence and sizes are checked, with `verify` also SHA-256. `without`: parts that are left out when the
    directory is opened (`EngineParts`). FileNotFoundError or ValueError, naming file and key, for a directory
    that is incomplete or damaged.
    """
    engine = Path(engine_dir)
    config = EngineConfig.load(engine, verify)
    left_out = tuple(EngineParts(config, without).without)
    listed = {entry.path: entry.size for entry in config.files}
    parts = tuple(_part(engine, name) for name in PARTS if graph_path(name) in listed)
    adapters: tuple[AdapterReport, ...] = ()
    if config.builder.max_lora_rank:
        inputs = {binding.name: binding.shape for binding in parts[0].inputs}
        found = read_adapters(find_adapters(engine), inputs, config.builder.max_lora_rank)
        adapters = adapter_reports(config, inputs, found)
    opened = [part for part in parts if part.name not in left_out]
    memory = memory_report(config, opened)
    return EngineReport(
        directory=str(engine),
        config=config,
        parts=parts,
        adapters=adapters,
        memory=memory,
        verified=verify,
        without=left_out,
    )


def render(report: EngineReport) -> str:
    """Render the report as tables: the model, memory, each graph's bindings."""
    rows = [("engine", report.directory), *model_rows(report.config, report.adapters)]
    if not report.parts:  # as of a policy on another computer
        return table(rows)
    rows.append(("files", f"{len(report.config.files)}, {'SHA-256' if report.verified else 'sizes'} checked"))
    memory = memory_rows(report.opened, report.adapters, report.memory)
    left_out = f" without {', '.join(report.without)}" if report.without else ""
    sections = [table(rows), f"memory{left_out}\n" + table(memory)]
    for part in report.parts:
        title = f"{graph_path(part.name)}: opset {part.opset}, {part.nodes} nodes"
        title += part.quantized_text
        beside = "".join(f"\n  variant {variant}" for variant in part.variants)
        beside += "".join(map(_plan_lines, part.plans))
        bindings = _binding_rows("in", part.inputs) + _binding_rows("out", part.outputs)
        sections.append(title + beside + "\n" + table(bindings))
    return "\n\n".join(sections)


def model_rows(config: EngineConfig, adapters: Sequence[AdapterReport]) -> list[tuple[str, str]]:
    """Make the rows of a table about the model and the limits of an engine."""
    builder = config.builder
    rows = [("model", f"{config.model_type}, {config.precision}{_cache_type(config)}")]
    if config.has_language_model:
        rows += _language_rows(config.llm)
    if config.vision is not None:
        vision = config.vision
        rows.append(
            ("vision", f"{vision.depth} blocks of {vision.hidden_size}, patches of {vision.patch_size} px")
        )
        rows.append(("video", _video_limits(vision, builder)))
    if config.audio is not None:
        audio = config.audio
        longest = audio.max_seconds(builder.max_input_len)
        rows.append(
            (
                "audio",
                f"{audio.encoder_layers} layers of {audio.d_model}, sounds of less than {longest:.2f} s",
            )
        )
    if config.action is not None:
        space = config.action.action_space
        units = (f" [{unit}]" if unit else "" for unit in space.units)
        names = ", ".join(f"{name}{unit}" for name, unit in zip(space.names, units, strict=True))
        rows.append(("action", f"{names}: {space.horizon} steps of {space.dt:g} s"))
        if not any(space.units):
            rows.append(("units", "of actions: those of the checkpoint, not stated"))
    if config.policy is not None:
        return rows + policy_rows(config.policy)
    if config.draft is not None:
        rows.append(("draft head", _draft_head(config.draft)))
    if builder.max_lora_rank:
        names = ", ".join(f"{adapter.name} (rank {adapter.rank})" for adapter in adapters)
        rows.append(("adapters", f"up to rank {builder.max_lora_rank}; {names or 'none here'}"))
    rows += [
        ("batch", f"{builder.max_batch_size} requests"),
        (
            "lengths",
            f"prompt and answer {builder.max_kv_cache_capacity} tokens, computed at once "
            f"{builder.max_input_len}",
        ),
    ]
    return rows


def _language_rows(llm: LanguageModelConfig) -> list[tuple[str, str]]:
    answers = f", {llm.reduced_vocab_size} to answer with" if llm.reduced_vocab_size else ""
    rows = [
        (
            "language",
            f"{llm.num_hidden_layers} layers of {llm.hidden_size}, vocabulary {llm.vocab_size}{answers}",
        ),
        (
            "attention",
            f"{llm.num_attention_heads} heads of {llm.head_dim}, {llm.num_key_value_heads} for keys",
        ),
    ]
    if llm.recurrent is not None:
        state = llm.recurrent
        kind = f"{state.num_layers} layers of {state.kind}"
        rows.append(("recurrent", f"{kind}, {state.num_heads} heads of {state.key_dim} x {state.value_dim}"))
    return rows


def _cache_type(config: EngineConfig) -> str:
    """Name the type of the KV cache if it is not the precision."""
    return f", KV cache in {config.kv_cache_type}" if config.builder.kv_cache is not None else ""


def _draft_head(draft: DraftConfig) -> str:
    """Describe a draft head and the trees that it drafts."""
    layers = "1 layer" if draft.num_layers == 1 else f"{draft.num_layers} layers"
    if draft.kind == MTP:
        states = "the states after the last norm"
    else:
        states = f"states at the inputs of layers {listed([str(layer) for layer in draft.base_state_layers])}"
    if draft.kind == DFLASH:
        after = listed([str(layer) for layer in draft.base_state_layers])
        return (
            f"{draft.kind}, {layers} of {draft.hidden_size}, vocabulary {draft.vocab_size}, states after "
            f"layers {after}; blocks of {draft.block_size} tokens, {draft.max_verify_tree_size} verified"
        )
    table = "" if draft.shares_embedding else ", embeddings of its own"
    return (
        f"{draft.kind}, {layers} of {draft.hidden_size}, vocabulary {draft.vocab_size}{table}, {states}; "
        f"trees of up to {draft.max_draft_tree_size} tokens, {draft.max_verify_tree_size} verified"
    )


def _video_limits(vision: VisionConfig, builder: BuilderConfig) -> str:
    """Describe the videos that a tower takes, for frames of a common size."""
    if not isinstance(vision, QwenVisionTower) or vision.video is None:
        return "not supported"
    processor, length = VideoProcessor(vision, vision.video), vision.temporal_patch_size
    words = TIMESTAMP_TOKENS if vision.video.timestamps == AS_TEXT else 0
    width, height = EXAMPLE_SIZE
    counts = range(length, length * builder.max_input_len + 1, length)
    grids = (processor.grid(frames, height, width) for frames in counts)
    most_tokens, capacity = builder.max_input_len, builder.max_kv_cache_capacity
    fitting = list(
        takewhile(
            lambda grid: grid.tokens <= most_tokens and grid.tokens + grid.groups * words < capacity, grids
        )
    )
    tokens = processor.grid(length, height, width).tokens
    limit = f"{length} frames of {width}x{height} px are {tokens} tokens"
    if not fitting:
        return f"groups of {length} frames; {limit}, too many for a prompt"
    most = fitting[-1]
    shrunk = f" ({most.group_tokens} each {length})" if most.group_tokens != tokens else ""
    return f"groups of {length} frames; {limit}, a prompt takes about {most.groups * length}{shrunk}"


def _part(engine: Path, name: str) -> PartReport:
    path = engine / graph_path(name)
    shared = _load(engine / graph_path("llm")).initializers if name == VERIFY else ()
    variants = tuple(sorted(variant.name for variant in path.parent.glob(f"{path.stem}.*.onnx")))
    return part_report(name, _load(path), variants, _plans(path), shared)


def _load(path: Path) -> ir.Graph:
    try:
        return ir.load(path).graph
    except Exception as error:  # protobuf and onnx raise classes of their own
        raise ValueError(f"{path}: not a readable ONNX file: {error}") from None


def part_report(
    name: str,
    graph: ir.Graph,
    variants: tuple[str, ...] = (),
    plans: tuple[PlanReport, ...] = (),
    shared: Container[str] = (),
) -> PartReport:
    """Describe one graph.

    variants: names of its variants' files; shared: weights of another graph.
    """
    nodes = list(graph)
    weights = [
        value.const_value
        for initializer, value in graph.initializers.items()
        if value.const_value and initializer not in shared
    ]
    return PartReport(
        name=name,
        opset=graph.opset_imports[""],
        nodes=len(nodes),
        operators=tuple(sorted({node.op_type for node in nodes})),
        inputs=tuple(_binding(value) for value in graph.inputs),
        outputs=tuple(_binding(value) for value in graph.outputs),
        weight_bytes=sum(weight.nbytes for weight in weights),
        quantized_bytes={
            str(kind).lower(): sum(weight.nbytes for weight in weights if weight.dtype == kind)
            for kind in QUANTIZED
            if any(weight.dtype == kind for weight in weights)
        },
        variants=variants,
        plans=plans,
    )


def _plans(model: Path) -> tuple[PlanReport, ...]:
    return tuple(
        PlanReport(
            name=plan.path.name,
            library=f"{TITLES[plan.library]} {plan.version}",
            gpus=plan.gpus,
            version_compatible=plan.version_compatible,
            bytes=plan.bytes,
            profiles=tuple(map(str, plan.profiles)),
            problem=_problem(plan, model),
        )
        for plan in read_plans(model)
    )


def _problem(plan: PlanFile, model: Path) -> str:
    try:
        plan.check(model)
    except EngineError as error:
        return str(error)
    return ""


def adapter_reports(
    config: EngineConfig, inputs: Mapping[str, Sequence[Any]], adapters: Mapping[str, PeftAdapter]
) -> tuple[AdapterReport, ...]:
    """Describe adapters of an engine.

    inputs: name of each input of the language model -> shape.
    """
    itemsize = np.dtype(DTYPES[config.precision].numpy()).itemsize
    reports = []
    for name, adapter in adapters.items():
        adapted = [entry for entry in lora_inputs(inputs) if entry.is_adapted(adapter.weights)]
        values = sum(math.prod(shape) for entry in adapted for shape in entry.shapes(adapter.rank))
        reports.append(AdapterReport(name, adapter.rank, len(adapter.weights), values * itemsize))
    return tuple(reports)


def _binding(value: ir.Value) -> BindingReport:
    shape = tuple(dim if isinstance(dim, int) else str(dim) for dim in value.shape or ())
    return BindingReport(str(value.name), str(value.dtype).lower(), shape)


def _plan_lines(plan: PlanReport) -> str:
    compatible = ", version-compatible" if plan.version_compatible else ""
    lines = [
        f"  plan    {plan.name}, {plan.bytes / 2**20:.3f} MiB",
        f"          for {listed(plan.gpus)}, by {plan.library}{compatible}",
        *(f"          profile {number}: {profile}" for number, profile in enumerate(plan.profiles)),
        *([f"          {plan.problem}"] if plan.problem else []),
    ]
    return "".join(f"\n{line}" for line in lines)


def _binding_rows(way: str, bindings: tuple[BindingReport, ...]) -> list[tuple[str, ...]]:
    """Make one row per binding.

    Bindings that differ only in the first number of their name (the layer) share a row.
    """
    numbers: dict[tuple[str, ...], list[str]] = {}
    for binding in bindings:
        stem, number, rest = _FIRST_NUMBER.fullmatch(binding.name).groups()  # type: ignore[union-attr]
        shape = "[" + ", ".join(map(str, binding.shape)) + "]"
        numbers.setdefault((stem, rest, binding.dtype, shape), []).append(number)
    rows: list[tuple[str, ...]] = []
    for (stem, rest, dtype, shape), found in numbers.items():
        number = found[0] if len(found) == 1 else f"{found[0]}..{found[-1]}"
        rows.append((way, stem + number + rest, dtype, shape))
    return rows


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Format columns as wide as their longest cell, two spaces apart, indented by two."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join("  " + line.rstrip() for line in lines)
