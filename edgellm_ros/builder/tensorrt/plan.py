# SPDX-License-Identifier: Apache-2.0
"""Builds TensorRT plans from ONNX graphs.

TensorRT builds a plan for this machine's GPU, and measures kernels on it; timings are kept in a timing cache,
which shortens later builds of the same graph. TensorRT for RTX builds for the GPUs that are named, on any
machine. Networks are strongly typed: both compute in the graph's types, and TF32 is off, so fp32 is fp32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from edgellm_ros.atomic_file import write_atomically
from edgellm_ros.builder.tensorrt.positive_scales import positive_scales
from edgellm_ros.builder.tensorrt.profiles import input_shapes, make_profiles
from edgellm_ros.diffusion.openpi_config import OpenPiConfig
from edgellm_ros.engine.backend import Binding
from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.onnx_bindings import read_bindings
from edgellm_ros.engine.optimization_profile import Profile
from edgellm_ros.engine.tensorrt.context_memory import ALIGNMENT
from edgellm_ros.engine.tensorrt.errors import engine_error
from edgellm_ros.engine.tensorrt.library import Library, library_log, load_library, start, title_of
from edgellm_ros.engine.tensorrt.plan_file import (
    RTX,
    TENSORRT,
    PlanFile,
    graph_sha256,
    listed,
    plan_path,
    write_plan,
)
from edgellm_ros.engine.tensorrt.rtx import check_gpus, check_precision, set_targets
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.files import graph_path

if TYPE_CHECKING:
    import tensorrt as trt


@dataclass(frozen=True)
class PlanOptions:
    """Options of a build."""

    gpus: tuple[str, ...] = ()  # to build for, such as "sm_89", with TensorRT for RTX; () = the GPU at hand
    workspace_bytes: int | None = None  # memory that a kernel may use at build and run time; None = all
    timing_cache: Path | None = None  # TensorRT's timing cache; None = a file in the engine directory
    version_compatible: bool = False  # also for later TensorRT versions and the lean runtime; may be slower
    verification_tokens: int | None = None  # most of the verification profile; None: see make_profiles


@dataclass(frozen=True)
class BuiltPlan:
    """One plan that was built."""

    part: str
    plan: PlanFile
    seconds: float


def build_plans(
    engine_dir: str | Path,
    open_device: Callable[[], Device],
    options: PlanOptions = PlanOptions(),
    progress: Callable[[str], None] = lambda line: None,
) -> list[BuiltPlan]:
    """Build the plan of every graph in an engine directory.

    `open_device`: is called to learn the GPU at hand, if no GPUs are named. `progress` gets a line for each
    step. FileNotFoundError or ValueError for a directory or options that cannot be used, OSError for a timing
    cache that cannot, or a full disk; EngineError without a library or GPU, or if the library refuses a
    graph. Plans are replaced atomically.
    """
    engine = Path(engine_dir)
    config = EngineConfig.load(engine)
    if isinstance(config.policy, OpenPiConfig):
        raise ValueError(
            f"{engine}: there is nothing to build: made by `edgellm connect-policy`, it has no engine but "
            f"asks the policy at {config.policy.url} for actions"
        )
    if config.builder.kv_cache is not None:
        raise ValueError(
            f"{engine}: TensorRT writes to a KV cache of fp32, fp16 or bf16, this engine's has "
            f"{config.kv_cache_type}; export without --kv-cache"
        )
    if config.policy is None:  # which has no KV cache
        _check_alignment(config)
    profiles = make_profiles(config, options.verification_tokens)
    library, gpus = _choose_library(options, open_device)
    timing_cache = None
    if library.__name__ == RTX:
        check_precision(gpus, config.precision)
    else:
        timing_cache = options.timing_cache or engine / f"{gpus[0]}-trt{library.__version__}.timing"
        timing_cache.parent.mkdir(parents=True, exist_ok=True)  # fail before the build, which takes minutes
    built = []
    for part, ranges in profiles.items():
        model = engine / graph_path(part)
        progress(f"{part}: building for {listed(gpus)} with {title_of(library)}; this takes a while")
        began = time.perf_counter()
        plan = build_plan(model, ranges, options, library, gpus, timing_cache)
        built.append(BuiltPlan(part, plan, time.perf_counter() - began))
        progress(f"{part}: {plan.path.name}, {plan.bytes / 1e6:.1f} MB, in {built[-1].seconds:.1f} s")
    return built


def build_plan(
    model: Path,
    profiles: Sequence[Profile],
    options: PlanOptions,
    library: Library,
    gpus: Sequence[str],
    timing_cache: Path | None = None,
) -> PlanFile:
    """Build the plan of one graph and write it beside the graph.

    EngineError has the library's messages.
    """
    contents = serialize_plan(model, profiles, options, library, gpus, timing_cache)
    compatible, name, version = options.version_compatible, library.__name__, library.__version__
    path = plan_path(model, gpus, name, version, compatible)
    plan = PlanFile(
        path=path,
        library=name,
        version=version,
        gpus=tuple(gpus),
        version_compatible=compatible,
        bytes=contents.nbytes,
        graph_sha256=graph_sha256(model),
        profiles=tuple(profiles),
    )
    write_plan(plan, contents)
    return plan


def _choose_library(
    options: PlanOptions, open_device: Callable[[], Device]
) -> tuple[Library, tuple[str, ...]]:
    """Return the library that builds, and the GPUs to build for.

    TensorRT for RTX if GPUs are named, or if only that is installed and supports the GPU at hand.
    """
    if not options.gpus:
        try:
            library = load_library(TENSORRT)
        except EngineError as missing:
            try:
                library = load_library(RTX)
            except EngineError as error:
                raise EngineError(f"{missing}; {error}") from None
        gpus: tuple[str, ...] = (_gpu_at_hand(open_device, library),)
    else:
        library = load_library(RTX)
        gpus = tuple(sorted(set(options.gpus), key=lambda gpu: int(gpu.removeprefix("sm_"))))
    if library.__name__ == RTX:
        check_gpus(gpus, library)
        for name, given in (
            ("version-compatible plans", options.version_compatible),
            ("timing cache", options.timing_cache is not None),
        ):
            if given:
                raise ValueError(f"TensorRT for RTX has no {name}")
    return library, gpus


def _check_alignment(config: EngineConfig) -> None:
    """Raise ValueError unless all caches are aligned as TensorRT needs."""
    llm, draft, capacity = config.llm, config.draft, config.builder.max_kv_cache_capacity
    caches = [("max_kv_cache_capacity", capacity, llm.num_key_value_heads * llm.head_dim)]
    if draft is not None:
        both = "max_kv_cache_capacity and max_draft_tree_size"
        rows = draft.cache_capacity(capacity)
        caches.append((both, rows, draft.num_key_value_heads * draft.head_dim))
    for name, rows, width in caches:
        row_bytes = width * (4 if config.precision == "fp32" else 2)
        if rows * row_bytes % ALIGNMENT:
            step = ALIGNMENT // math.gcd(ALIGNMENT, row_bytes)
            raise ValueError(
                f"{name} {rows}: the keys of a layer take {rows * row_bytes} bytes, TensorRT needs a "
                f"multiple of {ALIGNMENT}; export with a capacity that is a multiple of {step}"
            )


def _gpu_at_hand(open_device: Callable[[], Device], library: Library) -> str:
    try:
        return open_device().arch
    except EngineError as error:
        if library.__name__ != RTX:
            raise
        raise EngineError(f"{error}; --gpu names GPUs to build for without one") from None


def serialize_plan(
    model: Path,
    profiles: Sequence[Profile],
    options: PlanOptions,
    library: Library,
    gpus: Sequence[str],
    timing_cache: Path | None = None,
) -> memoryview:
    """Build the plan of one graph and return it.

    Arguments and errors are those of `build_plan`.
    """
    log, builder = library_log(library), start(library, library.Builder)
    network, _parser = parse(model, library, builder)
    config = builder.create_builder_config()
    config.clear_flag(library.BuilderFlag.TF32)
    if library.__name__ == RTX:
        set_targets(config, gpus, library)
    if options.version_compatible:
        config.set_flag(library.BuilderFlag.VERSION_COMPATIBLE)
    if options.workspace_bytes is not None:
        config.set_memory_pool_limit(library.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if timing_cache is not None:
        known = timing_cache.read_bytes() if timing_cache.is_file() else b""
        if not config.set_timing_cache(config.create_timing_cache(known), False):
            config.set_timing_cache(config.create_timing_cache(b""), False)  # another GPU's or TensorRT's
    bindings = {binding.name: binding for binding in read_bindings(model)}
    for ranges in profiles:
        profile = builder.create_optimization_profile()
        _set_shapes(profile, network, bindings, ranges)
        if config.add_optimization_profile(profile) < 0:
            raise engine_error(f"{model}: {title_of(library)} refuses the profile {ranges}: {log.take()}")
    log.take()
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise engine_error(f"{model}: {title_of(library)} could not build it: {log.take()}")
    if timing_cache is not None:
        write_atomically(timing_cache, memoryview(config.get_timing_cache().serialize()))
    return memoryview(plan).cast("B")  # its format is that of floats, in which nothing can be compared


def parse(
    model: Path, library: Library, builder: trt.Builder
) -> tuple[trt.INetworkDefinition, trt.OnnxParser]:
    """Parse an ONNX file into a network; the parser owns the network's weights.

    EngineError has the parser's messages.
    """
    log = library_log(library)
    # Not needed from TensorRT 11 on, where nothing else exists.
    network = builder.create_network(1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = library.OnnxParser(network, log)
    with positive_scales(model) as graph:
        parsed = parser.parse_from_file(str(graph))
    if not parsed:
        raise EngineError(f"{model}: the parser of {title_of(library)} refuses it: {_parser_errors(parser)}")
    _let_attention_decompose(library, network)
    return network, parser


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
