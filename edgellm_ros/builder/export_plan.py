# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint and prepares all files of its engine directory.

Everything that can be refused is refused here, from configurations and headers, before a file is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from edgellm_ros.builder.adapters import read_adapters
from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.checkpoint_config import ConfigSection, MixtureOfExpertsError, read_section
from edgellm_ros.builder.draft.fused import describe_head
from edgellm_ros.builder.draft.graph import build_draft, draft_lm_head
from edgellm_ros.builder.draft.graph_cuda import build_cuda_draft
from edgellm_ros.builder.draft.head import DraftHead, read_head
from edgellm_ros.builder.draft.layout import EMBEDDING
from edgellm_ros.builder.expert_config import ExpertArchitecture, expert_architecture
from edgellm_ros.builder.families import Family, find_family
from edgellm_ros.builder.flow_expert import build_expert
from edgellm_ros.builder.fused_expert import describe_expert
from edgellm_ros.builder.graph import DTYPES, GraphBuilder
from edgellm_ros.builder.int8_products import multiply_in_int8
from edgellm_ros.builder.lm_head import LMHead
from edgellm_ros.builder.model import LLMOptions, Model
from edgellm_ros.builder.policies import Policy, PolicySources, find_policy
from edgellm_ros.builder.quantization.layouts import find_layout
from edgellm_ros.builder.quantization.rounding import RoundedLayout, decoder_layers
from edgellm_ros.builder.quantization.search import GroupScales
from edgellm_ros.builder.safetensors_file import TensorFile
from edgellm_ros.builder.strips import strips
from edgellm_ros.builder.tensorrt_operators import check_operators
from edgellm_ros.builder.visible_rows import attend_to_visible_rows
from edgellm_ros.builder.vocabulary import (
    TOKENIZER_FILE,
    VOCAB_MAP,
    generation_defaults,
    read_generation_config,
    read_vocab_map,
    tokenizer_files,
)
from edgellm_ros.engine_directory import binding_names
from edgellm_ros.engine_directory.adapter_folder import find_adapters
from edgellm_ros.engine_directory.config import (
    FORMAT_VERSION,
    BuilderConfig,
    EngineConfig,
    GenerationDefaults,
    SpecialTokens,
)
from edgellm_ros.engine_directory.files import (
    CHAIN,
    D2T_FILE,
    DRAFT,
    DRAFT_EMBEDDING_FILE,
    VERIFY,
    graph_path,
)
from edgellm_ros.engine_directory.fused_draft import FUSED_DRAFT_FILE
from edgellm_ros.engine_directory.fused_expert import FUSED_EXPERT_FILE
from edgellm_ros.engine_directory.fused_model import FUSED_FILE
from edgellm_ros.engine_directory.lora_inputs import engine_module
from edgellm_ros.engine_directory.lora_scales import LORA_SCALES_FILE, LoraScales
from edgellm_ros.engine_directory.peft_adapter import PeftAdapter

EMBEDDING_FILE = "embedding.safetensors"
LM_HEAD_FILE = "lm_head.safetensors"
EXPERT_FOLDER = "action_expert"
TOKEN_OF_DRAFT_LOGIT = "token_of_draft_logit"  # the tensor of D2T_FILE
DRAFT_FOLDER = "draft"  # of a checkpoint: its draft head
VISION = "visual"  # the part of the engine
# Options of an export that a policy does not have.
LANGUAGE_MODEL_OPTIONS = (
    "max_lora_rank", "hidden_state_layers", "lm_head_input", "vocab_map", "draft", "quantize", "scales",
    "cpu_int8", "kv_cache",
)  # fmt: skip
NO_TOKENS = SpecialTokens(0, None, None, None, None, None, None)


@dataclass(frozen=True)
class ExportOptions:
    """Choices of an export; see `export`."""

    precision: str = "fp32"
    max_batch_size: int = 4
    max_input_len: int = 320
    max_kv_cache_capacity: int = 448
    max_lora_rank: int | None = None
    hidden_state_layers: tuple[int, ...] = ()
    lm_head_input: bool = False
    vocab_map: str | Path | None = None
    draft: str | Path | None = None  # a draft head; None = the one in the checkpoint's folder `draft`, if any
    with_draft: bool = True  # whether a draft head is exported
    max_draft_tree_size: int = 64
    max_verify_tree_size: int = 64
    quantize: str | None = None  # "int4" or "int8": round the layers of the language model
    group_size: int = 64  # inputs that share a scale, with `quantize`
    scales: tuple[GroupScales, ...] = ()  # of the inputs of the language model's layers, see `find_scales`
    cpu_int8: bool = False  # whether graphs for a CPU multiply in 8 bits
    kv_cache: str | None = None  # "fp8": the type of the KV cache; None = the precision
    vlm: str | Path | None = None  # of a policy: folder of its vision language model; None = find it
    dataset: str | Path | None = None  # of a policy: the folder `meta` of its data set

    def limits(self) -> BuilderConfig:
        """Check the options and return those that `config.json` of the engine has."""
        if self.precision not in DTYPES:
            raise ValueError(f"precision must be one of {', '.join(DTYPES)}, got {self.precision!r}")
        if self.cpu_int8 and self.precision != "fp32":
            raise ValueError(f"cpu_int8 needs precision fp32, got {self.precision!r}")
        return BuilderConfig(
            self.max_batch_size,
            self.max_input_len,
            self.max_kv_cache_capacity,
            self.max_lora_rank or 0,
            hidden_state_layers=self.hidden_state_layers,
            lm_head_input=self.lm_head_input,
            kv_cache=self.kv_cache,
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


def plan_export(checkpoint: Path, options: ExportOptions) -> ExportPlan:
    """Read a checkpoint and prepare its export; the weights are not read.

    Raises the errors of `export`.
    """
    # 1. Requested options.
    limits = options.limits()
    if not checkpoint.is_dir():
        raise FileNotFoundError(f"{checkpoint}: expected a checkpoint directory, found none")

    # 2. Parts of the checkpoint.
    section = read_section(checkpoint / "config.json")
    policy = find_policy(section)
    if policy is not None:
        return _plan_policy(policy, checkpoint, section, options)
    for name in ("vlm", "dataset"):
        if getattr(options, name) is not None:
            raise ValueError(f"{section.where}: --{name} is for policies such as SmolVLA")
    family, weights, model = read_model(checkpoint, section)
    for each in options.scales:
        each.group.fold(weights, each.scales)
    if options.quantize is not None:
        weights.quantize(rounded_layout(options, model))
    limit = model.llm.max_position_embeddings
    if limits.max_kv_cache_capacity > limit:
        raise ValueError(
            f"max_kv_cache_capacity {limits.max_kv_cache_capacity} exceeds the model's "
            f"{model.position_limit} {limit}"
        )
    expert = _read_expert(checkpoint, model)
    expert_weights = None if expert is None else Weights(checkpoint / EXPERT_FOLDER)
    stops = model.stop_token_ids
    if expert is not None:
        stops = tuple(dict.fromkeys((*stops, expert.future_start_token_id)))
    draft = _read_draft(checkpoint, options, model, weights)
    answers = None
    if options.vocab_map is not None:
        answers = read_vocab_map(Path(options.vocab_map), model.llm.vocab_size, stops)
    config = section.make(
        EngineConfig,
        format_version=FORMAT_VERSION,
        model_type=section.data["model_type"],
        precision=options.precision,
        llm=dataclasses.replace(model.llm, reduced_vocab_size=0 if answers is None else len(answers)),
        builder=limits,
        vision=model.vision,
        audio=model.audio,
        action=expert.config(model.llm) if expert else None,
        draft=draft.config(options.max_draft_tree_size, options.max_verify_tree_size) if draft else None,
        special_tokens=model.special_tokens,
        stop_token_ids=stops,
        generation=generation_defaults(read_generation_config(checkpoint)),
        files=(),
    )
    texts = tokenizer_files(checkpoint)
    folders = {} if options.max_lora_rank == 0 else find_adapters(checkpoint)

    # 3. Graphs; weights are read when the files are written.
    head = LMHead(
        weights,
        model.lm_head,
        vocab_size=model.llm.vocab_size,
        hidden_size=model.llm.hidden_size,
        is_embedding=model.lm_head == model.embedding,
        vocab_map=answers,
        as_input=options.lm_head_input,
    )
    llm_options = LLMOptions(
        options.precision,
        options.max_kv_cache_capacity,
        head,
        bool(folders or options.max_lora_rank),
        limits.hidden_state_layers,
        kv_cache=options.kv_cache,
    )
    llm = model.build_llm(llm_options)
    inputs = {str(value.name): tuple(value.shape or ()) for value in llm.graph.inputs}
    adapters = read_adapters(folders, inputs, options.max_lora_rank)
    if options.max_lora_rank is None:
        rank = max((adapter.rank for adapter in adapters.values()), default=0)
        config = dataclasses.replace(config, builder=dataclasses.replace(limits, max_lora_rank=rank))
    if options.scales and config.builder.max_lora_rank:
        texts[LORA_SCALES_FILE] = _lora_scales(options.scales).contents()
    parts: dict[str, GraphBuilder] = {"llm": llm}
    parts |= {part: build(options.precision) for part, build in model.encoders.items()}
    variants: dict[str, GraphBuilder] = {}  # for CUDA
    chains: dict[str, GraphBuilder] = {}  # for CUDA and chains of drafted tokens
    cpu = {"llm": model.build_llm(llm_options)}  # for a CPU
    if expert is not None and expert_weights is not None:
        sources = expert, model.llm, expert_weights, options.precision, options.max_kv_cache_capacity
        build = partial(build_expert, *sources, kv_cache=options.kv_cache)
        parts["action"], variants["action"] = build(), build(cuda=True)
        if options.precision != "fp32":
            described = describe_expert(expert, parts["action"], Path(graph_path("action")).name)
            texts[FUSED_EXPERT_FILE] = described.contents()
    if model.build_cuda_llm is not None:
        variants["llm"] = model.build_cuda_llm(llm_options)
    variants |= {part: build(options.precision) for part, build in model.cuda_encoders.items()}
    if draft is not None or model.llm.recurrent is not None:
        fusion = draft.fusion if draft is not None else None
        verifying = dataclasses.replace(
            llm_options, fusion=fusion, verifies=model.llm.recurrent is not None
        )
        parts[VERIFY], cpu[VERIFY] = model.build_llm(verifying), model.build_llm(verifying)
        parts[VERIFY].share_weights(llm, Path(graph_path("llm")).name, own=fusion is not None)
        if model.build_cuda_llm is not None:
            variants[VERIFY] = model.build_cuda_llm(verifying)
            if model.llm.recurrent is None:  # else it takes chains only
                chains[VERIFY] = model.build_cuda_llm(dataclasses.replace(verifying, only_chains=True))
    if draft is not None and config.draft is not None:
        capacity = config.draft.cache_capacity(options.max_kv_cache_capacity)
        arguments = draft, draft_lm_head(draft, head), options.precision, capacity
        parts[DRAFT], cpu[DRAFT] = build_draft(*arguments), build_draft(*arguments)
        variants[DRAFT] = build_cuda_draft(*arguments)
        chains[DRAFT] = build_cuda_draft(*arguments, only_chains=True)
        if options.precision != "fp32":
            graphs_and_files = ((parts[part], Path(graph_path(part)).name) for part in (DRAFT, VERIFY))
            description = describe_head(draft, arguments[1], capacity, *graphs_and_files)
            texts[FUSED_DRAFT_FILE] = description.contents()
    if options.cpu_int8:
        cpu |= {part: build(options.precision) for part, build in model.encoders.items()}
    cpu = {part: graph for part, graph in cpu.items() if _for_a_cpu(part, graph, options)}
    if options.kv_cache is None:  # TensorRT takes no FP8 cache (builder/tensorrt_plan.py)
        for part, graph in parts.items():
            check_operators(graph.graph, graph_path(part))
    graphs = {graph_path(part): graph for part, graph in parts.items()}
    cuda_file = Path(variant_path(graph_path("llm"), "cuda")).name
    for form, others in (("cuda", variants), (f"{CHAIN}.cuda", chains), ("cpu", cpu)):
        for part, variant in others.items():
            # Only graphs for CUDA have quantised weights in a layout of their own, which those of `llm` have
            # for all; only graphs for a CPU have new integers.
            own = weights.is_quantized or (form == "cpu" and options.cpu_int8)
            if weights.is_quantized and part == VERIFY and form != "cpu" and "llm" in variants:
                variant.share_weights(variants["llm"], cuda_file, own=True)
            variant.share_weights(parts[part], Path(graph_path(part)).name, own=own)
            graphs[variant_path(graph_path(part), form)] = variant
    if model.describe_llm is not None and options.precision != "fp32":
        described_llm = (llm, Path(graph_path("llm")).name), (variants["llm"], cuda_file)
        texts[FUSED_FILE] = model.describe_llm(llm_options, *described_llm).contents()

    return ExportPlan(
        family=family.name,
        parameters=sum(
            each.parameters
            for each in (weights, expert_weights, draft.weights if draft else None)
            if each is not None
        ),
        config=config,
        texts=texts,
        tensors=dict(_tensor_files(model, weights, options, head, answers))
        | dict(_draft_files(draft, options)),
        graphs=graphs,
        adapter_folders=folders,
        adapters=adapters,
    )


def _plan_policy(
    policy: Policy, checkpoint: Path, section: ConfigSection, options: ExportOptions
) -> ExportPlan:
    """Prepare the export of a policy, which has no language model that answers."""
    _check_policy_options(section, options)
    weights = Weights(checkpoint)
    folders = (None if each is None else Path(each) for each in (options.vlm, options.dataset))
    model = policy.read(checkpoint, section, weights, PolicySources(*folders))
    rows = model.config.max_prefix_rows
    limits = BuilderConfig(options.max_batch_size, max_input_len=rows, max_kv_cache_capacity=rows + 1)
    config = section.make(
        EngineConfig,
        format_version=FORMAT_VERSION,
        model_type=policy.name,
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
    graphs: dict[str, GraphBuilder] = {}
    for part, build in model.parts.items():
        graphs[graph_path(part)] = build(options.precision)
    for path, graph in graphs.items():
        check_operators(graph.graph, path)
    return ExportPlan(
        family=policy.name,
        parameters=weights.parameters,
        config=config,
        texts={TOKENIZER_FILE: model.tokenizer.read_bytes()},
        tensors={},
        graphs=graphs,
        adapter_folders={},
        adapters={},
    )


def _check_policy_options(section: ConfigSection, options: ExportOptions) -> None:
    """Refuse options that are for language models."""
    options.limits()
    defaults = ExportOptions()
    for name in LANGUAGE_MODEL_OPTIONS:
        if (getattr(options, name) or None) != (getattr(defaults, name) or None):
            raise section.fail("type", f"a policy, but {name} is for language models")


def _for_a_cpu(part: str, graph: GraphBuilder, options: ExportOptions) -> bool:
    """Adapt a graph to a CPU; return whether it differs from the standard graph."""
    cut = attend_to_visible_rows(graph.graph)
    if not options.cpu_int8:
        return cut
    # The LM head finds values that are not finite, which pixels never are.
    return multiply_in_int8(graph, lm_head=part == DRAFT, by_rows=part not in (VISION, DRAFT)) or cut


def read_model(checkpoint: Path, section: ConfigSection) -> tuple[Family, Weights, Model]:
    """Read the model of a checkpoint by its family."""
    layout = find_layout(section)
    try:
        family = find_family(section)
        weights = Weights(checkpoint, layout)
        if layout is not None and not weights.is_quantized:
            raise ValueError(f"{weights.where}: no layer is quantised, but the config says that some are")
        return family, weights, family.read(checkpoint, section, weights)
    except MixtureOfExpertsError as error:
        raise ValueError(f"{error}{_size(checkpoint)}") from None


def _lora_scales(scales: Sequence[GroupScales]) -> LoraScales:
    """Collect the factors of adapters for layers with scaled inputs."""
    inputs: dict[str, np.ndarray] = {}
    outputs: dict[str, np.ndarray] = {}
    for each in scales:
        group = each.group
        if group.source is None:
            continue
        inputs |= {engine_module(layer): each.scales for layer in group.layers}
        if group.shift is None:
            outputs[engine_module(group.source)] = group.source_factors(each.scales)
    return LoraScales(inputs, outputs)


def rounded_layout(options: ExportOptions, model: Model) -> RoundedLayout:
    """Make the layout of the weights that `quantize` asks for."""
    layers, dtype = decoder_layers(model.embedding), np.dtype(DTYPES[options.precision].numpy())
    kept = {layer: shares for each in options.scales for layer, shares in each.kept.items()}
    return RoundedLayout(str(options.quantize), options.group_size, layers, dtype, kept)


def _size(checkpoint: Path) -> str:
    """Tell how many parameters a checkpoint has; "" if its weights cannot be read."""
    try:
        return f"; the checkpoint has {Weights(checkpoint).parameters / 1e9:.3g} billion parameters"
    except (ValueError, OSError):
        return ""


def _read_expert(checkpoint: Path, model: Model) -> ExpertArchitecture | None:
    folder = checkpoint / EXPERT_FOLDER
    return expert_architecture(folder / "config.json", model.llm) if folder.is_dir() else None


def _read_draft(
    checkpoint: Path, options: ExportOptions, model: Model, weights: Weights
) -> DraftHead | None:
    folder = checkpoint / DRAFT_FOLDER if options.draft is None else Path(options.draft)
    if not options.with_draft or (options.draft is None and not folder.is_dir()):
        return None
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: expected the directory of a draft head, found none")
    if not model.verifies_drafts:
        raise ValueError(
            f"{folder}: a draft head for a language model of a family of its own: supported are dense "
            "decoders and hybrids; --no-draft exports the model alone"
        )
    if options.kv_cache is not None:
        raise ValueError(
            f"{folder}: a draft head is not supported with a KV cache of type {options.kv_cache}; --no-draft "
            "exports the model alone"
        )
    dtype = np.dtype(DTYPES[options.precision].numpy())
    return read_head(folder, model, weights, dtype, options.max_kv_cache_capacity)


def variant_path(path: str, form: str) -> str:
    """Return the path of a variant of the graph at `path`.

    The variant has the weights of that graph. form: "cpu", "cuda" or "chain.cuda".
    """
    return f"{path.removesuffix('.onnx')}.{form}.onnx"


def _draft_files(draft: DraftHead | None, options: ExportOptions) -> Iterator[tuple[str, TensorFile]]:
    """Yield the files of a draft head's tensors that the runtime reads."""
    if draft is None:
        return
    tokens = draft.token_of_logit
    if tokens is not None:
        yield D2T_FILE, TensorFile(TOKEN_OF_DRAFT_LOGIT, tokens.dtype, tokens.shape, lambda: [tokens])
    if draft.embedding:
        dtype, shape = np.dtype(DTYPES[options.precision].numpy()), draft.weights.shape(EMBEDDING)
        blocks: Callable = partial(draft.weights.read_strips, EMBEDDING, dtype)
        yield DRAFT_EMBEDDING_FILE, TensorFile("embedding", dtype, (shape[0], shape[1]), blocks)


def _tensor_files(
    model: Model, weights: Weights, options: ExportOptions, head: LMHead, answers: np.ndarray | None
) -> Iterator[tuple[str, TensorFile]]:
    """Yield the files of tensors that the runtime reads: path and contents."""
    dtype = np.dtype(DTYPES[options.precision].numpy())
    table = model.llm.vocab_size, model.llm.hidden_size
    weights.require(model.embedding, table)
    # The runtime looks up rows of the embedding table outside of the graphs.
    blocks: Callable = partial(weights.read_strips, model.embedding, dtype)
    yield EMBEDDING_FILE, TensorFile("embedding", dtype, table, blocks)
    if answers is not None:
        chosen = TensorFile(VOCAB_MAP, answers.dtype, answers.shape, lambda: [answers])
        yield f"{VOCAB_MAP}.safetensors", chosen
    if options.lm_head_input:
        matrix = TensorFile(binding_names.LM_HEAD, dtype, head.shape, lambda: strips(head.read(), dtype))
        yield LM_HEAD_FILE, matrix
