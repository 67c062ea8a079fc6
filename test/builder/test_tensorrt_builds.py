# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's parser and builder take every graph.

The plans keep the layers that TensorRT has kernels for.

The library is TensorRT for RTX, which builds without a GPU. All graphs of the demo's checkpoint are parsed
and built in every precision, and the first layers of its language model with every combination of export
options, with the profiles of `edgellm build`.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import save_file

from edgellm_ros.builder import export
from edgellm_ros.builder.export_cache import ARENA_CHECKPOINT
from edgellm_ros.builder.families import families, registered
from edgellm_ros.builder.tensorrt import plan as tensorrt_plan
from edgellm_ros.builder.tensorrt.plan import PlanOptions, parse, serialize_plan
from edgellm_ros.builder.tensorrt.profiles import make_profiles
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensorrt.library import Library, load_library, start
from edgellm_ros.engine.tensorrt.plan_file import RTX
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.config import PRECISIONS, EngineConfig
from edgellm_ros.engine_directory.files import CONTEXT, DRAFT, VERIFY, graph_path
from edgellm_ros.engine_directory.schema import read_json
from fixtures.act_checkpoint import write_act
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.dflash_checkpoints import write_qwen3_with_drafter
from fixtures.diffusion_checkpoint import write_diffusion
from fixtures.draws import draws
from fixtures.groot_checkpoint import write_groot_of_lerobot
from fixtures.groot_n16_checkpoint import ONE_ROBOT_N16, write_groot_n16
from fixtures.internvl_checkpoint import write_internvl_checkpoint
from fixtures.mtp_checkpoints import write_mimo
from fixtures.pi_checkpoint import write_pi
from fixtures.qwen2_5_omni_checkpoint import write_qwen2_5_omni
from fixtures.qwen2_5_vl_checkpoint import write_qwen2_5_vl_checkpoint
from fixtures.qwen3_asr_checkpoint import ORIGINAL, write_qwen3_asr
from fixtures.qwen3_vl_checkpoint import write_qwen3_vl_checkpoint
from fixtures.random_head import base_config, write_random_head
from fixtures.seed_oss_family import SEED_OSS, write_seed_oss_checkpoint
from fixtures.smolvla_checkpoint import write_smolvla
from fixtures.xvla_checkpoint import write_xvla

pytestmark = pytest.mark.tensorrt_build
TURING = "sm_75"
GPUS = ("sm_86", "sm_89", "sm_120")
REFUSED_FOR_TURING = {"fp32": "FP32 GEMM is not supported", "bf16": "HW-specific datatypes: b16"}
WITHOUT_DEDICATED_KERNEL = "Attention operation was not supported by a dedicated kernel"
# Kinds of layer that TensorRT has kernels for; all are counted, so that 0 is expected of the others.
NATIVE = ("KV_CACHE_UPDATE", "ATTENTION_OUTPUT", "ROTARY_EMBEDDING", "NORMALIZATION", "SOFTMAX")
LAYERS = 3  # two that take DeepStack features, and one that does not; a build takes as long as its layers


def write_short_arena(folder: Path) -> Path:
    """Write the demo's checkpoint with LAYERS layers and without the action head."""
    folder.mkdir()
    for file in ARENA_CHECKPOINT.iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = read_json(ARENA_CHECKPOINT / "config.json")
    config["text_config"]["num_hidden_layers"] = LAYERS
    (folder / "config.json").write_text(json.dumps(config))
    return folder


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "qwen3_omni": lambda folder: ARENA_CHECKPOINT,
    "short_qwen3_omni": write_short_arena,
    "qwen2_5_vl": write_qwen2_5_vl_checkpoint,
    "qwen3_vl": write_qwen3_vl_checkpoint,
    "internvl": partial(write_internvl_checkpoint, vision={"use_qk_norm": True}),
    "seed_oss": write_seed_oss_checkpoint,
    "qwen3_asr": partial(write_qwen3_asr, layout=ORIGINAL),
    "qwen2_5_omni": write_qwen2_5_omni,
}
CHECKPOINTS["mimo"] = write_mimo
DECODERS = ("qwen2", "qwen3", "llama")  # sliding windows, norms of heads, biases of all layers
CHECKPOINTS |= {name: partial(write_decoder_checkpoint, model_type=name) for name in DECODERS}
HYBRIDS = {"nemotron_h", "qwen3_5"}  # test_hybrid_builds.py builds them
OF_OTHERS = {"alpamayo"}  # a Qwen3-VL, and an expert whose operators test_tensorrt_graphs.py compares
OPTIONS = ("lora", "hidden_states", "lm_head_input", "vocab_map")
COMBINATIONS = [
    tuple(itertools.compress(OPTIONS, chosen)) for chosen in itertools.product((False, True), repeat=4)
]
THREE, ALONE = ([each for each in COMBINATIONS if len(each) == count] for count in (3, 1))
# Those with three options and the graph without any have each pair of options in all four ways.
CHOSEN = draws(
    {"fp16": THREE, "fp32": [OPTIONS], "bf16": [OPTIONS]},
    {"fp16": COMBINATIONS[1:], "fp32": ALONE, "bf16": ALONE},
)


@dataclass(frozen=True)
class Case:
    """One graph, as it is exported."""

    part: str
    precision: str
    options: tuple[str, ...] = ()
    family: str = "qwen3_omni"

    def __str__(self) -> str:
        return "-".join((self.family, self.part, self.precision, *self.options))

    @property
    def gpus(self) -> tuple[str, ...]:
        return GPUS if self.precision in REFUSED_FOR_TURING else (TURING, *GPUS)


WITH_OPTIONS = [
    Case("llm", precision, options, "short_qwen3_omni")
    for precision in PRECISIONS
    for options in CHOSEN[precision]
]
PLAIN = [Case(*chosen) for chosen in itertools.product(("llm", "visual", "audio", "action"), PRECISIONS)]
TOWERS = [
    Case("visual", precision, family=family)
    for family, precision in itertools.product(("internvl", "qwen2_5_vl", "qwen3_vl"), PRECISIONS)
]
TEXTS = [Case("llm", "fp16", family=name) for name in ("seed_oss", "mimo", *DECODERS)]
SPEECH = [Case(part, "fp16", family="qwen3_asr") for part in ("llm", "audio")]
OMNI = [Case(part, "fp16", family="qwen2_5_omni") for part in ("llm", "visual", "audio")]
CASES = [*WITH_OPTIONS, *PLAIN, *TOWERS, *TEXTS, *SPEECH, *OMNI]
DECODER_CASES = [case for case in CASES if case.family in DECODERS]
WITH_WINDOWS = [case for case in TOWERS if case.family == "qwen2_5_vl"]
WITH_ATTENTION_LAYERS = [*PLAIN, *DECODER_CASES, *WITH_WINDOWS]


@dataclass
class Graph:
    """A graph, and the network that NVIDIA's parser makes of it."""

    case: Case
    model: Path
    config: EngineConfig
    network: Any
    parser: Any  # owns the network's weights
    seconds: float

    def layers(self, kind: str, interface: type | None = None) -> list[Any]:
        """List the layers of one kind, with all attributes if their interface is given."""
        layers = [self.network.get_layer(i) for i in range(self.network.num_layers)]
        found = [layer for layer in layers if layer.type.name == kind]
        for layer in found:
            layer.__class__ = interface or layer.__class__  # the bindings return a plain ILayer
        return found

    def count(self) -> dict[str, int]:
        return {kind: len(self.layers(kind)) for kind in NATIVE}

    def nodes(self) -> Counter[str]:
        return Counter(node.op_type for node in onnx.load(self.model, load_external_data=False).graph.node)


@contextmanager
def exported(case: Case) -> Iterator[tuple[Path, EngineConfig]]:
    """Export a checkpoint; its files are removed at the end.

    The files of all checkpoints together need some GB.
    """
    with tempfile.TemporaryDirectory() as name, registered(SEED_OSS):
        folder = Path(name)
        checkpoint = CHECKPOINTS[case.family](folder / "checkpoint")
        options: dict[str, Any] = {"max_lora_rank": None if "lora" in case.options else 0}
        text = read_json(checkpoint / "config.json").get("text_config", {})
        if "hidden_states" in case.options:
            options["hidden_state_layers"] = (1, text["num_hidden_layers"])
        if "lm_head_input" in case.options:
            options["lm_head_input"] = True
        if "vocab_map" in case.options:
            options["vocab_map"] = folder / "map.safetensors"
            save_file({"vocab_map": np.arange(text["vocab_size"] // 2)}, options["vocab_map"])
        config = export(checkpoint, folder / "engine", precision=case.precision, with_draft=False, **options)
        yield folder / "engine" / case.part / "model.onnx", config


@pytest.fixture(scope="module")
def library() -> Library:
    try:
        return load_library(RTX)
    except EngineError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=CASES, ids=str)
def graph(request, library) -> Iterator[Graph]:
    builder = start(library, library.Builder)
    with exported(request.param) as (model, config):
        began = time.perf_counter()
        network, parser = parse(model, library, builder)
        yield Graph(request.param, model, config, network, parser, time.perf_counter() - began)


def serialize(model: Path, config: EngineConfig, library: Library, gpus: tuple[str, ...]) -> memoryview:
    return serialize_plan(model, make_profiles(config)[model.parent.name], PlanOptions(), library, gpus)


def export_with_eagle_head(folder: Path, precision: str) -> EngineConfig:
    checkpoint = write_decoder_checkpoint(folder / "checkpoint", "llama")
    head = write_random_head(folder / "head", base_config(checkpoint), fc_norm=True, layers=2)
    return export(checkpoint, folder / "engine", precision=precision, draft=head)


def export_with_mtp_head(folder: Path, precision: str) -> EngineConfig:
    return export(write_mimo(folder / "checkpoint"), folder / "engine", precision=precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("export_with_head", [export_with_eagle_head, export_with_mtp_head])
def test_the_builder_makes_plans_of_a_draft_head_and_of_its_base(
    tmp_path, library, precision, export_with_head
):
    """The base verifies and gives its states; the head's cache is the longer one."""
    config = export_with_head(tmp_path, precision)
    for part, layers in ((VERIFY, config.llm.num_hidden_layers), (DRAFT, config.draft.num_layers)):
        model = tmp_path / "engine" / graph_path(part)
        network, parser = parse(model, library, start(library, library.Builder))
        graph = Graph(Case(part, precision), model, config, network, parser, 0.0)
        counts = {"KV_CACHE_UPDATE": 2 * layers, "ATTENTION_OUTPUT": layers, "ROTARY_EMBEDDING": 2 * layers}
        assert graph.count() == dict.fromkeys(NATIVE, 0) | counts
        profiles = make_profiles(config)[part]
        gpus = GPUS if precision in REFUSED_FOR_TURING else (TURING, *GPUS)
        plan = serialize_plan(model, profiles, PlanOptions(), library, gpus)
        weights = [path.stat().st_size for path in model.parent.glob("*.data")]
        assert plan.nbytes > sum(weights)  # of both files for the base


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_builder_makes_plans_of_a_block_drafter_and_of_its_base(tmp_path, library, precision):
    checkpoint = write_qwen3_with_drafter(tmp_path / "checkpoint")
    config = export(checkpoint, tmp_path / "engine", precision=precision)
    base, own = config.llm.num_hidden_layers, config.draft.num_layers
    for part, layers, attentions, rotations in (
        (VERIFY, base, base, 2 * base),
        (DRAFT, own, own, 2 * own),
        (CONTEXT, own, 0, own),
    ):
        model = tmp_path / "engine" / graph_path(part)
        network, parser = parse(model, library, start(library, library.Builder))
        graph = Graph(Case(part, precision), model, config, network, parser, 0.0)
        counts = {
            "KV_CACHE_UPDATE": 2 * layers,
            "ATTENTION_OUTPUT": attentions,
            "ROTARY_EMBEDDING": rotations,
        }
        assert graph.count() == dict.fromkeys(NATIVE, 0) | counts
        gpus = GPUS if precision in REFUSED_FOR_TURING else (TURING, *GPUS)
        plan = serialize_plan(model, make_profiles(config)[part], PlanOptions(), library, gpus)
        assert plan.nbytes > 10_000


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("write", "layers"),
    [
        # one block; 3 layers, of the last one the keys alone; 3 layers, one of them without keys of its own
        (write_smolvla, {"visual": (1, 0), "prefix": (2, 5), "action": (3, 5)}),
        # one block; 2 layers, of the last one the keys alone; 2 layers
        (partial(write_pi, kind="pi0"), {"visual": (1, 0), "prefix": (1, 3), "action": (2, 4)}),
        (partial(write_pi, kind="pi05"), {"visual": (1, 0), "prefix": (1, 3), "action": (2, 4)}),
        # three blocks; three layers of the language model and one over them; a DiT of four layers
        (write_groot_of_lerobot, {"visual": (3, 6), "prefix": (4, 6), "action": (4, 0)}),
        # two blocks; three layers of the language model; a DiT of four layers
        (
            partial(write_groot_n16, shape=ONE_ROBOT_N16),
            {"visual": (2, 0), "prefix": (3, 6), "action": (4, 0)},
        ),
        (write_act, {"action": (3, 0)}),  # a layer of the encoder, two attentions of the decoder
        (write_diffusion, {"prefix": (0, 0), "action": (0, 0)}),
        # the windows of two blocks; a layer of the encoder; two layers
        (write_xvla, {"visual": (2, 0), "prefix": (1, 0), "action": (2, 0)}),
    ],
    ids=["smolvla", "pi0", "pi05", "groot", "groot n16", "act", "diffusion", "xvla"],
)
def test_the_parser_takes_the_graphs_of_a_policy(tmp_path, library, precision, write, layers):
    config = export(write(tmp_path / "checkpoint"), tmp_path / "engine", precision=precision)
    found = {}
    for part in make_profiles(config):
        model = tmp_path / "engine" / graph_path(part)
        network, parser = parse(model, library, start(library, library.Builder))
        kinds = Counter(str(network.get_layer(i).type).rpartition(".")[2] for i in range(network.num_layers))
        found[part] = kinds["ATTENTION_OUTPUT"], kinds["ROTARY_EMBEDDING"]
        del network, parser
    assert found == layers


def native_layers(config: EngineConfig, part: str) -> dict[str, int]:
    """Compute the number of native layers of each kind from the model's config."""
    layers = {
        "llm": config.llm.num_hidden_layers,
        "visual": config.vision.depth if config.vision else 0,
        "audio": config.audio.encoder_layers if config.audio else 0,
        "action": config.action.num_hidden_layers if config.action else 0,
    }[part]
    found = dict.fromkeys(NATIVE, 0) | {"ATTENTION_OUTPUT": layers}
    if part == "action":
        return found | {"ROTARY_EMBEDDING": 2 * layers}
    if part == "llm":  # the keys and the values of each layer; the queries and the keys of each layer
        return found | {"KV_CACHE_UPDATE": 2 * layers, "ROTARY_EMBEDDING": 2 * layers}
    if part == "visual":  # two norms in a block, one in each merger or in the projector
        norms = 2 * layers + 1 + config.vision.num_deepstack_features
        norms = 0 if config.vision.kind == "qwen2_5_vl" else norms  # its norms are RMSNorms
        rotated = 0 if config.vision.kind == "internvl" else 2 * layers
        return found | {"ROTARY_EMBEDDING": rotated, "NORMALIZATION": norms}
    return found | {"NORMALIZATION": 2 * layers + 1}  # two in a layer, and the last


def test_every_family_and_every_graph_is_among_the_cases():
    """A draft head and the graph of its base have a test of their own."""
    assert {family.name for family in families()} <= CHECKPOINTS.keys() | HYBRIDS | OF_OTHERS
    with exported(PLAIN[0]) as (_, config):
        assert {case.part for case in PLAIN} == make_profiles(config).keys()


def test_the_parser_makes_the_native_layers_that_the_config_calls_for(graph):
    assert graph.count() == native_layers(graph.config, graph.case.part)


def test_the_parser_keeps_layer_norms_and_writes_out_rms_norms(graph, library):
    """An RMSNormalization becomes a mean, a square root and elementwise layers.

    The operator becomes no NORMALIZATION.
    """
    nodes = graph.nodes()
    means = graph.layers("REDUCE", library.IReduceLayer)
    roots = graph.layers("UNARY", library.IUnaryLayer)
    assert len(graph.layers("NORMALIZATION")) == nodes["LayerNormalization"]
    expected_means = nodes["RMSNormalization"] + nodes["ReduceMean"]
    assert Counter(layer.op.name for layer in means)["AVG"] == expected_means
    assert Counter(layer.op.name for layer in roots)["SQRT"] == nodes["RMSNormalization"]


def test_only_the_language_model_updates_caches_and_does_it_in_place(graph):
    """TensorRT binds input and output of a KV_CACHE_UPDATE to the same memory."""
    updates = [(layer.get_input(0), layer.get_output(0)) for layer in graph.layers("KV_CACHE_UPDATE")]
    layers = graph.config.llm.num_hidden_layers if graph.case.part == "llm" else 0
    assert sorted((cache.name, present.name) for cache, present in updates) == sorted(
        pair
        for i in range(layers)
        for pair in (
            (names.key_cache(i), names.present_key(i)),
            (names.value_cache(i), names.present_value(i)),
        )
    )
    assert all(cache.is_network_input and present.is_network_output for cache, present in updates)


def test_the_builder_makes_a_plan_for_several_gpus(graph, library, record_property):
    began = time.perf_counter()
    plan = serialize(graph.model, graph.config, library, graph.case.gpus)
    seconds = time.perf_counter() - began
    row = {"parse_s": graph.seconds, "build_s": seconds, "plan_mb": plan.nbytes / 1e6, **graph.count()}
    record_property("tensorrt_build", {"graph": str(graph.case), **row})
    assert plan.nbytes > graph.model.with_name("model.onnx.data").stat().st_size  # it has the weights


@pytest.mark.parametrize("case", [case for case in PLAIN if case.precision in REFUSED_FOR_TURING], ids=str)
def test_the_builder_refuses_fp32_and_bf16_for_turing(case, library):
    with (
        exported(case) as (model, config),
        pytest.raises(EngineError, match=f"could not build it: .*{REFUSED_FOR_TURING[case.precision]}"),
    ):
        serialize(model, config, library, (TURING,))


@pytest.mark.parametrize("case", WITH_ATTENTION_LAYERS, ids=str)
def test_attention_has_a_dedicated_kernel_unless_it_is_fp32(case, library, monkeypatch):
    """The builder refuses an attention without a dedicated kernel.

    The builder takes such an attention if it may use several kernels for it.
    """
    monkeypatch.setattr(tensorrt_plan, "_let_attention_decompose", lambda library, network: None)
    with exported(case) as (model, config):
        if case.precision != "fp32":
            assert serialize(model, config, library, case.gpus).nbytes
            return
        with pytest.raises(EngineError, match=WITHOUT_DEDICATED_KERNEL):
            serialize(model, config, library, case.gpus)
