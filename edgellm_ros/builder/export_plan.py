# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint and prepares all files of its engine directory.

Everything that can be refused is refused here, from configurations and headers, before a file is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from edgellm_ros.builder.adapters import read_adapters
from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.checkpoint_config import ConfigSection, MixtureOfExpertsError, read_section
from edgellm_ros.builder.expert_config import ExpertArchitecture, expert_architecture
from edgellm_ros.builder.families import Family, find_family
from edgellm_ros.builder.flow_expert import build_expert
from edgellm_ros.builder.graph import DTYPES, GraphBuilder
from edgellm_ros.builder.lm_head import LMHead
from edgellm_ros.builder.model import LLMOptions, Model
from edgellm_ros.builder.safetensors_file import TensorFile
from edgellm_ros.builder.strips import strips
from edgellm_ros.builder.tensorrt_operators import check_operators
from edgellm_ros.builder.unsupported import refuse_quantised
from edgellm_ros.builder.vocabulary import (
    VOCAB_MAP,
    generation_defaults,
    read_generation_config,
    read_vocab_map,
    tokenizer_files,
)
from edgellm_ros.engine_directory import binding_names
from edgellm_ros.engine_directory.adapter_folder import find_adapters
from edgellm_ros.engine_directory.config import FORMAT_VERSION, BuilderConfig, EngineConfig
from edgellm_ros.engine_directory.peft_adapter import PeftAdapter

EMBEDDING_FILE = "embedding.safetensors"
LM_HEAD_FILE = "lm_head.safetensors"
EXPERT_FOLDER = "action_expert"
GRAPH_FILE, CUDA_VARIANT = "model.onnx", "model.cuda.onnx"


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

    def limits(self) -> BuilderConfig:
        """Check the options and return those that `config.json` of the engine has."""
        if self.precision not in DTYPES:
            raise ValueError(f"precision must be one of {', '.join(DTYPES)}, got {self.precision!r}")
        return BuilderConfig(
            self.max_batch_size,
            self.max_input_len,
            self.max_kv_cache_capacity,
            self.max_lora_rank or 0,
            hidden_state_layers=self.hidden_state_layers,
            lm_head_input=self.lm_head_input,
        )


@dataclass(frozen=True)
class ExportPlan:
    """An export that was checked, before it is written. Paths are relative to the engine directory."""

    family: str
    parameters: int  # values of the checkpoint's tensors, the action expert's included
    config: EngineConfig  # without files
    texts: dict[str, bytes]  # path -> contents of small files
    tensors: dict[str, TensorFile]  # path -> file with one tensor
    graphs: dict[str, GraphBuilder]  # part ("llm", "visual", ...) -> graph
    variants: dict[str, GraphBuilder]  # part -> graph for CUDA that uses the weights of the part's graph
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
    family, weights, model = _read_model(checkpoint, section)
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
    )
    llm = model.build_llm(llm_options)
    inputs = {str(value.name): tuple(value.shape or ()) for value in llm.graph.inputs}
    adapters = read_adapters(folders, inputs, options.max_lora_rank)
    if options.max_lora_rank is None:
        rank = max((adapter.rank for adapter in adapters.values()), default=0)
        config = dataclasses.replace(config, builder=dataclasses.replace(limits, max_lora_rank=rank))
    graphs: dict[str, GraphBuilder] = {"llm": llm}
    graphs |= {part: build(options.precision) for part, build in model.encoders.items()}
    if expert is not None and expert_weights is not None:
        graphs["action"] = build_expert(
            expert, model.llm, expert_weights, options.precision, options.max_kv_cache_capacity
        )
    for part, graph in graphs.items():
        check_operators(graph.graph, f"{part}/{GRAPH_FILE}")
    variants: dict[str, GraphBuilder] = {}
    if model.build_cuda_llm is not None:
        variants["llm"] = model.build_cuda_llm(llm_options)
    variants |= {part: build(options.precision) for part, build in model.cuda_encoders.items()}
    for part, variant in variants.items():
        variant.share_weights(graphs[part])

    return ExportPlan(
        family=family.name,
        parameters=weights.parameters + (expert_weights.parameters if expert_weights else 0),
        config=config,
        texts=texts,
        tensors=dict(_tensor_files(model, weights, options, head, answers)),
        graphs=graphs,
        variants=variants,
        adapter_folders=folders,
        adapters=adapters,
    )


def _read_model(checkpoint: Path, section: ConfigSection) -> tuple[Family, Weights, Model]:
    refuse_quantised(section)
    try:
        family = find_family(section)
        weights = Weights(checkpoint)
        return family, weights, family.read(checkpoint, section, weights)
    except MixtureOfExpertsError as error:
        raise ValueError(f"{error}{_size(checkpoint)}") from None


def _size(checkpoint: Path) -> str:
    """Tell how many parameters a checkpoint has; "" if its weights cannot be read."""
    try:
        return f"; the checkpoint has {Weights(checkpoint).parameters / 1e9:.3g} billion parameters"
    except (ValueError, OSError):
        return ""


def _read_expert(checkpoint: Path, model: Model) -> ExpertArchitecture | None:
    folder = checkpoint / EXPERT_FOLDER
    return expert_architecture(folder / "config.json", model.llm) if folder.is_dir() else None


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
