# SPDX-License-Identifier: Apache-2.0
"""Builds TensorRT plans from ONNX graphs.

A plan is for this machine's GPU and TensorRT version. Networks are strongly typed: TensorRT computes in the
graph's types, and TF32 is off, so fp32 is fp32. Kernel timings are kept in a timing cache, which shortens
later builds of the same graph.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from edgellm_ros.builder.profiles import VERIFICATION_TOKENS, Profile, input_shapes, make_profiles
from edgellm_ros.engine.backend import Binding
from edgellm_ros.engine.context_memory import ALIGNMENT
from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.onnx_bindings import read_bindings
from edgellm_ros.engine.tensorrt_library import (
    FULL,
    Library,
    engine_error,
    library_log,
    load_library,
    plan_path,
    start,
)
from edgellm_ros.engine_directory.config import EngineConfig

if TYPE_CHECKING:
    import tensorrt as trt


@dataclass(frozen=True)
class PlanOptions:
    """Options of a build."""

    workspace_bytes: int | None = None  # memory that a kernel may use at build and run time; None = all
    timing_cache: Path | None = None  # file of the timing cache; None = a file in the engine directory
    version_compatible: bool = False  # also for later TensorRT versions and the lean runtime; may be slower
    verification_tokens: int = VERIFICATION_TOKENS  # largest number of tokens of the verification profile


@dataclass(frozen=True)
class BuiltPlan:
    """One plan on disk."""

    part: str
    path: Path
    seconds: float
    bytes: int


def build_plans(
    engine_dir: str | Path,
    open_device: Callable[[], Device],
    options: PlanOptions = PlanOptions(),
    progress: Callable[[str], None] = lambda line: None,
) -> list[BuiltPlan]:
    """Build the plan of every graph in an engine directory.

    `progress` gets a line for each step. FileNotFoundError or ValueError for a directory that cannot be used,
    OSError for a timing cache that cannot; EngineError without TensorRT or GPU, or if TensorRT refuses a
    graph. Plans are replaced atomically.
    """
    engine = Path(engine_dir)
    config = EngineConfig.load(engine)
    _check_alignment(config)
    profiles = make_profiles(config, options.verification_tokens)
    library = load_library(FULL)
    arch = open_device().arch
    cache = options.timing_cache or engine / f"{arch}-trt{library.__version__}.timing"
    cache.parent.mkdir(parents=True, exist_ok=True)  # fail before the build, which takes minutes
    built = []
    for part, ranges in profiles.items():
        model = engine / part / "model.onnx"
        progress(f"{part}: building for {arch} with TensorRT {library.__version__}; this takes minutes")
        began = time.perf_counter()
        plan = build_plan(model, ranges, cache, options, library)
        path = plan_path(model, arch, library.__version__, options.version_compatible)
        _write(path, plan)
        built.append(BuiltPlan(part, path, time.perf_counter() - began, len(plan)))
        progress(f"{part}: {path.name}, {len(plan) / 1e6:.1f} MB, in {built[-1].seconds:.1f} s")
    return built


def _check_alignment(config: EngineConfig) -> None:
    """Raise ValueError unless all caches are aligned as TensorRT needs."""
    llm, capacity = config.llm, config.builder.max_kv_cache_capacity
    row_bytes = llm.num_key_value_heads * llm.head_dim * (4 if config.precision == "fp32" else 2)
    if capacity * row_bytes % ALIGNMENT:
        step = ALIGNMENT // math.gcd(ALIGNMENT, row_bytes)
        raise ValueError(
            f"max_kv_cache_capacity {capacity}: the keys of a layer take {capacity * row_bytes} bytes, "
            f"TensorRT needs a multiple of {ALIGNMENT}; export with a capacity that is a multiple of {step}"
        )


def build_plan(
    model: Path, profiles: Sequence[Profile], timing_cache: Path, options: PlanOptions, library: Library
) -> memoryview:
    """Build the plan of one graph; EngineError has TensorRT's messages."""
    log, builder = library_log(library), start(library, library.Builder)
    # Not needed from TensorRT 11 on, where nothing else exists.
    network = builder.create_network(1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = library.OnnxParser(network, log)
    if not parser.parse_from_file(str(model)):
        raise EngineError(f"{model}: TensorRT's parser refuses it: {_parser_errors(parser)}")
    _let_attention_decompose(library, network)
    config = builder.create_builder_config()
    config.clear_flag(library.BuilderFlag.TF32)
    if options.version_compatible:
        config.set_flag(library.BuilderFlag.VERSION_COMPATIBLE)
    if options.workspace_bytes is not None:
        config.set_memory_pool_limit(library.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    known = timing_cache.read_bytes() if timing_cache.is_file() else b""
    if not config.set_timing_cache(config.create_timing_cache(known), False):
        config.set_timing_cache(config.create_timing_cache(b""), False)  # another GPU's or TensorRT's
    bindings = {binding.name: binding for binding in read_bindings(model)}
    for ranges in profiles:
        profile = builder.create_optimization_profile()
        _set_shapes(profile, network, bindings, ranges)
        if config.add_optimization_profile(profile) < 0:
            raise engine_error(f"{model}: TensorRT refuses a profile: {log.take()}")
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise engine_error(f"{model}: TensorRT could not build it: {log.take()}")
    _write(timing_cache, memoryview(config.get_timing_cache().serialize()))
    return memoryview(plan)


def _let_attention_decompose(library: Library, network: trt.INetworkDefinition) -> None:
    """Let TensorRT use several kernels for an attention that no fused kernel supports.

    TensorRT refuses the network otherwise, and ONNX has no attribute for it.
    """
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type == library.LayerType.ATTENTION_OUTPUT:
            layer.__class__ = library.IAttentionOutputLayer  # the bindings return a plain ILayer
            cast("trt.IAttentionOutputLayer", layer).attention.decomposable = True


def _set_shapes(
    profile: trt.IOptimizationProfile,
    network: trt.INetworkDefinition,
    bindings: Mapping[str, Binding],
    ranges: Profile,
) -> None:
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        if -1 in tuple(tensor.shape):
            low, tuned, high = input_shapes(tensor.name, bindings[tensor.name].shape, ranges)
            profile.set_shape(tensor.name, low, tuned, high)


def _parser_errors(parser: trt.OnnxParser) -> str:
    """Join the parser's errors, with the nodes' names."""
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    return "; ".join(f"{error.node_operator()} {error.node_name()}: {error.desc()}" for error in errors)


def _write(path: Path, contents: memoryview) -> None:
    """Replace the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_bytes(contents)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
