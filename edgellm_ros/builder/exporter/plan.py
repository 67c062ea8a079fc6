# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint and prepares all files of its engine directory.

Everything that can be refused is refused here, from configurations and headers, before a file is written.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from edgellm_ros.builder.action.expert_config import PlainArchitecture
from edgellm_ros.builder.action.fused_expert import describe_expert
from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, StrictSection, read_section
from edgellm_ros.builder.checkpoint.safetensors_file import TensorFile
from edgellm_ros.builder.config.known_policies import check_folder, is_policy
from edgellm_ros.builder.config.prompt_files import TOKENIZER_FILE, prompt_files
from edgellm_ros.builder.draft.fused import describe_head
from edgellm_ros.builder.draft.graph import draft_lm_head
from edgellm_ros.builder.exporter.artefacts import (
    CUDA,
    LLM,
    STANDARD,
    Graphs,
    artefact_path,
    artefacts,
    build_graphs,
    file_name,
)
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.policy_graphs import policy_graphs
from edgellm_ros.builder.exporter.sources import Sources, read_sources
from edgellm_ros.builder.exporter.tensor_files import collected_scales, tensor_files
from edgellm_ros.builder.gguf.checkpoint import as_checkpoint, find_gguf
from edgellm_ros.builder.graph.graph import GraphBuilder
from edgellm_ros.builder.graph.lm_head import LMHead
from edgellm_ros.builder.lowering.fused import describe_decoder, has_fused_kernels
from edgellm_ros.builder.policies import Policy, PolicySources, find_policy
from edgellm_ros.builder.policies.peft import read_weights
from edgellm_ros.builder.weights.adapters import read_adapters
from edgellm_ros.builder.weights.unread_weights import UnreadWeights, unread_weights
from edgellm_ros.engine_directory.adapters.lora_scales import LORA_SCALES_FILE
from edgellm_ros.engine_directory.adapters.peft_adapter import PeftAdapter
from edgellm_ros.engine_directory.builder_config import BuilderConfig
from edgellm_ros.engine_directory.choices import PRECISIONS
from edgellm_ros.engine_directory.config import (
    FORMAT_VERSION,
    EngineConfig,
    GenerationDefaults,
    SpecialTokens,
)
from edgellm_ros.engine_directory.draft_config import DFLASH
from edgellm_ros.engine_directory.files import DRAFT, VERIFY
from edgellm_ros.engine_directory.parts import ACTION, VISUAL
from edgellm_ros.fused.description.decoder import FUSED_FILE
from edgellm_ros.fused.description.draft import FUSED_DRAFT_FILE
from edgellm_ros.fused.description.expert import FUSED_EXPERT_FILE
from edgellm_ros.fused.description.vision import FUSED_VISION_FILE

# Options of an export that a policy does not have.
LANGUAGE_MODEL_OPTIONS = (
    "max_lora_rank", "hidden_state_layers", "lm_head_input", "vocab_map", "draft", "draft_vocab_size",
    "scales", "kv_cache",
)  # fmt: skip
POLICY_ROUNDING = "int8"  # what `quantize` may be of a policy (docs/policies.md has the figures)
NO_TOKENS = SpecialTokens(
    pad_token_id=0,
    image_token_id=None,
    vision_start_token_id=None,
    vision_end_token_id=None,
    audio_token_id=None,
    audio_start_token_id=None,
    audio_end_token_id=None,
)


@dataclass(frozen=True)
class ExportPlan:
    """An export that was checked, before it is written.

    Paths are relative to the engine directory.
    """

    family: str
    parameters: int  # values of the checkpoint's tensors, the action expert's included
    config: EngineConfig  # without files
    texts: dict[str, bytes]  # path -> contents of small files
    tensors: dict[str, TensorFile]  # path -> file with one tensor
    graphs: dict[str, GraphBuilder]  # path -> graph, after the graph whose weights it shares
    adapter_folders: dict[str, Path]  # name -> folder in the checkpoint
    adapters: dict[str, PeftAdapter]
    unread: tuple[UnreadWeights, ...]  # of the checkpoint without action expert and draft head


def plan_export(checkpoint: Path, options: ExportOptions) -> ExportPlan:
    """Read a checkpoint and prepare its export; the weights are not read.

    Raises the errors of `export`.
    """
    limits = builder_config(options)
    gguf = find_gguf(checkpoint)
    if gguf is not None:
        with as_checkpoint(gguf, options.mmproj) as folder:
            return plan_export(folder, dataclasses.replace(options, mmproj=None))
    if not checkpoint.is_dir():
        raise FileNotFoundError(f"{checkpoint}: expected a checkpoint directory, found none")
    if options.mmproj is not None:
        raise ValueError(f"{checkpoint}: --mmproj is for GGUF files")
    check_folder(checkpoint)
    section = read_section(checkpoint / "config.json")
    if {"format_version", "stop_token_ids"} <= section.data.keys():
        raise ValueError(f"{section.where}: of an engine directory, expected a checkpoint")
    policy = find_policy(section)
    if policy is not None:
        return _plan_policy(policy, checkpoint, StrictSection(section.data, section.where), options)
    for name in ("vlm", "dataset", "lerobot", "embodiment"):
        if getattr(options, name) is not None and not is_policy(section.data.get("model_type")):
            raise ValueError(f"{section.where}: --{name} is for policies such as SmolVLA")
    sources = read_sources(checkpoint, section, options, limits)
    model, config, head = sources.model, sources.config(), sources.lm_head()
    text_only = model.vision is None and model.audio is None and sources.expert is None
    texts = dict(model.prompts or {}) or prompt_files(
        checkpoint, model.llm.vocab_size, text_only, model.transcribes
    )

    graphs = build_graphs(artefacts(sources, head, config.draft), sources)
    inputs = {str(value.name): tuple(value.shape or ()) for value in graphs[LLM, STANDARD].graph.inputs}
    adapters = read_adapters(sources.adapters, inputs, options.max_lora_rank)
    if options.max_lora_rank is None:
        rank = max((adapter.rank for adapter in adapters.values()), default=0)
        config = dataclasses.replace(config, builder=dataclasses.replace(limits, max_lora_rank=rank))
    if options.scales and config.builder.max_lora_rank:
        texts[LORA_SCALES_FILE] = collected_scales(options.scales).contents()
    if options.precision != "fp32":
        texts |= _fused_descriptions(sources, config, head, graphs)
    return ExportPlan(
        family=sources.family.name,
        parameters=sources.parameters,
        config=config,
        texts=texts,
        tensors=dict(tensor_files(sources, head)),
        graphs={artefact_path(part, form): graph for (part, form), graph in graphs.items()},
        adapter_folders=sources.adapters,
        adapters=adapters,
        unread=unread_weights(sources.weights),
    )


def builder_config(options: ExportOptions) -> BuilderConfig:
    """Check options and return those that `config.json` of the engine has."""
    if options.precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {options.precision!r}")
    if options.cpu_int8 and options.precision != "fp32":
        raise ValueError(f"cpu_int8 needs precision fp32, got {options.precision!r}")
    return BuilderConfig(
        options.max_batch_size,
        options.max_input_len,
        options.max_kv_cache_capacity,
        options.max_lora_rank or 0,
        hidden_state_layers=tuple(options.hidden_state_layers),  # callers may give any sequence
        lm_head_input=options.lm_head_input,
        kv_cache=options.kv_cache,
    )


def _fused_descriptions(
    sources: Sources, config: EngineConfig, head: LMHead, graphs: Graphs
) -> dict[str, bytes]:
    """Return the files that describe parts for the fused kernels: path -> contents."""
    model, draft, texts = sources.model, sources.draft, {}

    def stored(part: str, form: str = STANDARD) -> tuple[GraphBuilder, str]:
        return graphs[part, form], file_name(part, form)

    if has_fused_kernels(model.decoder):
        options = sources.llm_options(head)
        described = describe_decoder(model.decoder, options, stored(LLM), stored(LLM, CUDA))
        texts[FUSED_FILE] = described.contents()
    tower = None if model.describe_vision is None else model.describe_vision(*stored(VISUAL))
    if tower is not None:
        texts[FUSED_VISION_FILE] = tower.contents()
    architecture = None if sources.expert is None else sources.expert.architecture
    if isinstance(architecture, PlainArchitecture):
        texts[FUSED_EXPERT_FILE] = describe_expert(architecture, *stored(ACTION)).contents()
    if draft is not None and config.draft is not None and draft.kind != DFLASH:
        capacity = config.draft.cache_capacity(sources.options.max_kv_cache_capacity)
        lm_head = draft_lm_head(draft, head)
        texts[FUSED_DRAFT_FILE] = describe_head(
            draft, lm_head, capacity, stored(DRAFT), stored(VERIFY)
        ).contents()
    return texts


def _plan_policy(
    policy: Policy, checkpoint: Path, section: ConfigSection, options: ExportOptions
) -> ExportPlan:
    """Prepare the export of a policy, which has no language model that answers."""
    _check_policy_options(section, options)
    if options.embodiment is not None and not policy.embodiments:
        raise ValueError(f"{section.where}: --embodiment: a {policy.name} is for one robot")
    weights = read_weights(checkpoint, section)
    vlm, dataset = (None if each is None else Path(each) for each in (options.vlm, options.dataset))
    if options.lerobot is not None and not policy.lerobot:
        raise section.fail("type", f"the same with every LeRobot (--lerobot {options.lerobot})")
    sources = PolicySources(vlm, dataset, options.lerobot, options.embodiment)
    model = policy.read(checkpoint, section, weights, sources)
    rows = model.config.max_prefix_rows
    limits = BuilderConfig(
        options.max_batch_size,
        max_input_len=rows,
        max_kv_cache_capacity=rows + 1,
        max_action_samples=BuilderConfig.max_action_samples if model.config.from_noise else 1,
    )
    config = section.make(
        EngineConfig,
        format_version=FORMAT_VERSION,
        model_type=model.config.kind,
        precision=options.precision,
        llm=model.llm,
        builder=limits,
        vision=None,
        audio=None,
        action=model.config,
        draft=None,
        special_tokens=NO_TOKENS,
        stop_token_ids=(),
        generation=GenerationDefaults(),
        files=(),
    )
    return ExportPlan(
        family=model.config.kind,
        parameters=weights.parameters,
        config=config,
        texts={} if model.tokenizer is None else {TOKENIZER_FILE: model.tokenizer},
        tensors={},
        graphs=policy_graphs(model, section, options),
        adapter_folders={},
        adapters={},
        unread=unread_weights(weights),
    )


def _check_policy_options(section: ConfigSection, options: ExportOptions) -> None:
    """Refuse options that are for language models."""
    builder_config(options)
    defaults, key = ExportOptions(), "type" if section.has("type") else "model_type"
    for name in LANGUAGE_MODEL_OPTIONS:
        if (getattr(options, name) or None) != (getattr(defaults, name) or None):
            raise section.fail(key, f"a policy, but {name} is for language models")
    if options.quantize not in (None, POLICY_ROUNDING):
        raise section.fail(
            key,
            f"a policy, whose actions {options.quantize!r} would change too much: quantize takes "
            f"{POLICY_ROUNDING} here",
        )
