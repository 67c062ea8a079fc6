# SPDX-License-Identifier: Apache-2.0
"""`edgellm build` with TensorRT's double: its profiles, options and files."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from doubles import tensorrt_double, tensorrt_rtx_double
from doubles.deferred_device import DeferredDevice
from edgellm_ros.builder import export, inspect, render
from edgellm_ros.builder.tensorrt.plan import PlanOptions, build_plans
from edgellm_ros.builder.tensorrt.profiles import input_shapes, make_profiles, windows
from edgellm_ros.cli import main
from edgellm_ros.engine import device as devices
from edgellm_ros.engine.errors import DeviceMemoryError, EngineError
from edgellm_ros.engine.optimization_profile import Profile, Range
from edgellm_ros.engine.tensorrt.plan_choice import choose_plan
from edgellm_ros.engine_directory.config import EngineConfig
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.random_head import base_config, write_random_head
from fixtures.vision_config import WINDOWS

pytestmark = pytest.mark.only_on("cpu", reason="these tests bring their own TensorRT")
NAME = "host-trt11.4.0.106.plan"


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt_double)
    return tensorrt_double


@pytest.fixture
def engine(tiny_lora_engine, tmp_path):
    return shutil.copytree(tiny_lora_engine, tmp_path / "engine")


def open_device():
    return DeferredDevice("tensorrt")


def test_every_graph_gets_a_plan_that_inspect_lists(engine):
    told = []
    built = build_plans(engine, open_device, progress=told.append)
    assert [plan.part for plan in built] == ["llm", "visual", "audio", "action"]
    assert all(each.plan.path == engine / each.part / NAME for each in built)
    assert all(each.plan.bytes == each.plan.path.stat().st_size for each in built)
    assert [[plan.name for plan in part.plans] for part in inspect(engine).parts] == [[NAME]] * 4
    assert told[0].startswith("llm: building for host with TensorRT 11.4.0.106")
    assert [path.name for path in engine.rglob("*.unfinished")] == []


def test_the_language_model_has_a_profile_for_prefill_decode_and_verification(engine):
    build_plans(engine, open_device, PlanOptions(verification_tokens=9))
    plan = json.loads((engine / "llm" / NAME).read_bytes()[28:])
    embeds = [profile["inputs_embeds"] for profile in plan["profiles"]]
    assert embeds == [
        [[1, 2, 48], [1, 320, 48], [4, 320, 48]],
        [[1, 1, 48], [1, 1, 48], [4, 1, 48]],
        [[1, 1, 48], [1, 9, 48], [4, 9, 48]],
    ]
    wanted = [profile["last_token_ids"][2] for profile in plan["profiles"]]
    assert wanted == [[4, 1], [4, 1], [4, 9]]
    lora = "model.layers.0.self_attn.{}.lora_A.weight"
    assert plan["profiles"][1][lora.format("o_proj")] == [[64, 1], [64, 8], [64, 8]]
    joined = lora.format("q_proj:64+k_proj:32+v_proj:32")
    assert plan["profiles"][1][joined] == [[48, 3], [48, 24], [48, 24]]


def test_an_engine_with_a_draft_head_gets_own_plans_for_verification_and_drafting(tmp_path):
    checkpoint = write_decoder_checkpoint(tmp_path / "checkpoint", "llama")
    head = write_random_head(tmp_path / "head", base_config(checkpoint))
    engine = tmp_path / "engine"
    export(checkpoint, engine, draft=head, max_draft_tree_size=32, max_verify_tree_size=24)
    built = build_plans(engine, open_device)
    assert [plan.part for plan in built] == ["llm", "llm/verify", "draft"]
    assert [plan.plan.path.name for plan in built] == [NAME, f"verify.{NAME}", NAME]
    assert [[plan.name for plan in part.plans] for part in inspect(engine).parts] == [
        [NAME],
        [f"verify.{NAME}"],
        [NAME],
    ]
    assert choose_plan(engine / "llm" / "verify.onnx", open_device())[1].path == built[1].plan.path
    contents = [json.loads(plan.plan.path.read_bytes()[28:]) for plan in built[1:]]
    sizes = [[profile["inputs_embeds"][2][:2] for profile in plan["profiles"]] for plan in contents]
    assert sizes == [[[4, 320], [4, 1], [4, 24]], [[4, 320], [4, 32]]]


def test_the_caches_of_a_draft_head_must_be_aligned(tmp_path):
    checkpoint = write_decoder_checkpoint(tmp_path / "checkpoint", "llama")
    head = write_random_head(
        tmp_path / "head", base_config(checkpoint), num_key_value_heads=1, num_attention_heads=1, head_dim=4
    )
    export(checkpoint, tmp_path / "engine", draft=head, max_draft_tree_size=60)
    message = "max_kv_cache_capacity and max_draft_tree_size 508: .* a multiple of 16"
    with pytest.raises(ValueError, match=message):
        build_plans(tmp_path / "engine", open_device)


def test_caches_are_updated_in_place(engine):
    build_plans(engine, open_device)
    aliases = json.loads((engine / "llm" / NAME).read_bytes()[28:])["aliases"]
    layers = EngineConfig.load(engine).llm.num_hidden_layers
    assert aliases == {
        f"present_{kind}_{i}": f"{kind}_cache_{i}" for kind in ("key", "value") for i in range(layers)
    }


def test_attention_may_be_decomposed_where_no_fused_kernel_exists(engine, library, monkeypatch):
    networks = []

    def build(self, network, config):
        networks.append(network)
        return make(self, network, config)

    make = library.Builder.build_serialized_network
    monkeypatch.setattr(library.Builder, "build_serialized_network", build)
    build_plans(engine, open_device)
    attentions = [
        layer.attention
        for network in networks
        for layer in network._layers
        if layer.type == library.LayerType.ATTENTION_OUTPUT
    ]
    assert len(attentions) == 11
    assert all(attention.decomposable for attention in attentions)


@pytest.mark.slow
def test_the_timing_cache_is_reused_by_the_next_build(engine, tmp_path):
    build_plans(engine, open_device)
    assert (engine / "host-trt11.4.0.106.timing").read_bytes() == b"llmvisualaudioaction"
    own = tmp_path / "times" / "file"
    for times in (1, 2):
        build_plans(engine, open_device, PlanOptions(timing_cache=own))
        assert own.read_bytes() == b"llmvisualaudioaction" * times


def test_an_unwritable_timing_cache_is_an_error_before_the_build(engine, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    nowhere = PlanOptions(timing_cache=tmp_path / "file" / "cache")
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        build_plans(engine, open_device, nowhere)
    assert not list(engine.glob("*/*.plan"))


def test_options_reach_tensorrt(engine, library, monkeypatch):
    asked = {}

    def build(self, network, config):
        asked.update(flags=config._flags, pools=config._pools, network=network._flags)
        return make(self, network, config)

    make = library.Builder.build_serialized_network
    monkeypatch.setattr(library.Builder, "build_serialized_network", build)
    build_plans(engine, open_device, PlanOptions(workspace_bytes=10**9, version_compatible=True))
    assert asked["flags"] == {library.BuilderFlag.VERSION_COMPATIBLE}  # and no TF32
    assert asked["pools"] == {library.MemoryPoolType.WORKSPACE: 10**9}
    assert asked["network"] == 1 << library.NetworkDefinitionCreationFlag.STRONGLY_TYPED
    assert (engine / "llm" / "host-trt11.4.0.106-compatible.plan").is_file()


def test_a_node_that_the_parser_refuses_is_named(engine, library, monkeypatch):
    def parse(self, model):
        self._errors = [
            library.ParserError("no importer", "/layers.0/X", "X"),
            library.ParserError("axes must be constant", "/layers.1/Y", "Y"),
        ]
        return False

    monkeypatch.setattr(library.OnnxParser, "parse_from_file", parse)
    message = (
        r"llm/model.onnx: the parser of TensorRT 11.4.0.106 refuses it: "
        r"X /layers.0/X: no importer; Y /layers.1/Y: axes"
    )
    with pytest.raises(EngineError, match=message):
        build_plans(engine, open_device)


def test_a_failed_build_says_why_and_leaves_the_old_plan(engine, library, monkeypatch):
    def fail(self, network, config):
        self._logger.log(library.ILogger.Severity.ERROR, "Error Code 2: OutOfMemory (Requested 9 bytes)")

    (engine / "llm" / NAME).write_bytes(b"before")
    monkeypatch.setattr(library.Builder, "build_serialized_network", fail)
    with pytest.raises(DeviceMemoryError, match=r"could not build it: .*Requested 9 bytes"):
        build_plans(engine, open_device)
    assert (engine / "llm" / NAME).read_bytes() == b"before"


def test_a_build_without_a_gpu_is_an_error(engine):
    def none():
        raise EngineError("device 'tensorrt' is not available: no usable NVIDIA GPU")

    with pytest.raises(EngineError, match="no usable NVIDIA GPU"):
        build_plans(engine, none)


def test_the_command_writes_plans_and_prints_them(engine, monkeypatch, capsys):
    monkeypatch.setattr(devices, "open_device", lambda name: open_device())
    assert main(["build", str(engine), "--verification-tokens", "5", "--json"]) == 0
    out, err = capsys.readouterr()
    plans = json.loads(out)["plans"]
    assert [plan["path"] for plan in plans] == [
        str(engine / part / NAME) for part in ("llm", "visual", "audio", "action")
    ]
    assert all(plan["bytes"] > 0 and plan["seconds"] >= 0 for plan in plans)
    assert err.count("this takes a while") == 4


class TestNamedGpus:
    """`edgellm build --gpu` with the double of TensorRT for RTX."""

    @pytest.fixture(autouse=True)
    def rtx(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "tensorrt_rtx", tensorrt_rtx_double)
        return tensorrt_rtx_double

    @staticmethod
    def no_device():
        raise AssertionError("no GPU is needed")

    def test_plans_are_for_the_named_gpus_in_order_and_without_a_gpu(self, engine):
        built = build_plans(engine, self.no_device, PlanOptions(gpus=("sm_120", "sm_86", "sm_120")))
        name = "sm_86+sm_120-rtx1.7.1.116.plan"
        assert [(each.part, each.plan.path.name) for each in built] == [
            (part, name) for part in ("llm", "visual", "audio", "action")
        ]
        assert json.loads((engine / "llm" / name).read_bytes()[28:])["gpus"] == ["SM86", "SM120"]
        assert not list(engine.glob("*.timing"))

    def test_runs_need_no_memory_but_ours(self, engine, rtx, monkeypatch):
        flags = []

        def build(self, network, config):
            flags.append(config._flags)
            return make(self, network, config)

        make = rtx.Builder.build_serialized_network
        monkeypatch.setattr(rtx.Builder, "build_serialized_network", build)
        build_plans(engine, self.no_device, PlanOptions(gpus=("sm_89",)))
        assert flags == [{rtx.BuilderFlag.REQUIRE_USER_ALLOCATION}] * 4  # and no TF32

    def test_inspect_shows_library_gpus_size_and_profiles(self, engine):
        build_plans(engine, self.no_device, PlanOptions(gpus=("sm_86", "sm_89"), verification_tokens=9))
        plan = inspect(engine).parts[0].plans[0]
        assert (plan.library, plan.gpus) == ("TensorRT for RTX 1.7.1.116", ("sm_86", "sm_89"))
        assert plan.bytes == (engine / "llm" / plan.name).stat().st_size
        text = render(inspect(engine))
        assert f"plan    {plan.name}, {plan.bytes / 2**20:.3f} MiB\n" in text
        assert "for sm_86 and sm_89, by TensorRT for RTX 1.7.1.116\n" in text
        assert "profile 0: prefill (B 1..4, S 2..320, N 1, r 1..8," in text
        assert "profile 2: verification (B 1..4, S 1..9, N 1..9, r 1..8," in text

    def test_inspect_says_why_a_plan_cannot_run(self, engine):
        build_plans(engine, self.no_device, PlanOptions(gpus=("sm_89",)))
        path = engine / "visual" / "sm_89-rtx1.7.1.116.plan"
        path.write_bytes(path.read_bytes()[:100])
        assert f"{path} has 100 bytes, " in render(inspect(engine))

    def test_an_unsupported_gpu_names_those_that_are_supported(self, engine):
        with pytest.raises(
            EngineError, match=r"RTX 1.7.1.116 does not support sm_87, only sm_75, .*sm_120 and sm_121; other"
        ):
            build_plans(engine, self.no_device, PlanOptions(gpus=("sm_89", "sm_87")))
        assert not list(engine.glob("*/*.plan"))

    def test_turing_is_built_for_in_fp16_only(self, engine, tiny_checkpoint, tmp_path):
        with pytest.raises(ValueError, match=r"fp16 only on sm_75, the engine directory is fp32: export"):
            build_plans(engine, self.no_device, PlanOptions(gpus=("sm_75", "sm_89")))
        export(tiny_checkpoint, tmp_path / "fp16", precision="fp16")
        built = build_plans(tmp_path / "fp16", self.no_device, PlanOptions(gpus=("sm_75", "sm_89")))
        assert built[0].plan.gpus == ("sm_75", "sm_89")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"version_compatible": True}, "TensorRT for RTX has no version-compatible plans"),
            ({"timing_cache": Path("file")}, "TensorRT for RTX has no timing cache"),
        ],
    )
    def test_options_of_tensorrt_are_refused(self, engine, options, message):
        with pytest.raises(ValueError, match=message):
            build_plans(engine, self.no_device, PlanOptions(gpus=("sm_89",), **options))

    def test_without_tensorrt_the_gpu_at_hand_is_built_for(self, engine, monkeypatch):
        monkeypatch.setitem(sys.modules, "tensorrt", None)
        monkeypatch.setattr(DeferredDevice, "arch", "sm_121")
        built = build_plans(engine, open_device)
        assert {each.plan.path.name for each in built} == {"sm_121-rtx1.7.1.116.plan"}

    def test_without_any_library_the_error_says_what_to_install(self, engine, monkeypatch):
        for name in ("tensorrt", "tensorrt_rtx"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(EngineError, match=r"TensorRT is not .*pip install tensorrt-cu13; .*RTX"):
            build_plans(engine, open_device)

    def test_without_a_library_named_gpus_are_an_error_that_says_what_to_install(self, engine, monkeypatch):
        monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
        with pytest.raises(
            EngineError, match=r"TensorRT for RTX is not installed .*pip install tensorrt_rtx_cu13"
        ):
            build_plans(engine, self.no_device, PlanOptions(gpus=("sm_89",)))

    @pytest.mark.parametrize("text", ["8.9", "sm_", "sm_89,", "sm_89 sm_86", "SM89", "sm_0x", ""])
    def test_a_gpu_that_is_no_compute_capability_is_bad_input(self, engine, capsys, text):
        with pytest.raises(SystemExit) as e:
            main(["build", str(engine), "--gpu", text])
        assert e.value.code == 2
        assert "--gpu: expected GPUs by compute capability, such as sm_86,sm_89" in capsys.readouterr().err


def test_a_capacity_that_makes_unaligned_caches_is_refused(tiny_checkpoint, tmp_path):
    export(tiny_checkpoint, tmp_path, precision="fp16", max_kv_cache_capacity=447)
    row = EngineConfig.load(tmp_path).llm.num_key_value_heads * EngineConfig.load(tmp_path).llm.head_dim * 2
    message = (
        f"max_kv_cache_capacity 447: the keys of a layer take {447 * row} bytes, .* multiple of {256 // row}$"
    )
    with pytest.raises(ValueError, match=message):
        build_plans(tmp_path, open_device)


def test_a_dimension_without_a_range_is_named():
    profile = Profile("any", {"B": Range(1, 2, 3)})
    assert input_shapes("x", ("B", 4), profile) == ((1, 4), (2, 4), (3, 4))
    with pytest.raises(ValueError, match="input x: no range for dimension 'S', only for B"):
        input_shapes("x", ("B", "S"), profile)


def test_more_drafted_tokens_than_the_cache_holds_are_refused(tiny_engine):
    with pytest.raises(ValueError, match="verification of 449 tokens: expected 1 to the KV cache's 448"):
        make_profiles(EngineConfig.load(tiny_engine), 449)


def test_an_engine_with_a_small_cache_verifies_as_many_tokens_as_the_cache_holds(tiny_checkpoint, tmp_path):
    export(tiny_checkpoint, tmp_path, max_input_len=28, max_kv_cache_capacity=30)
    verification = make_profiles(EngineConfig.load(tmp_path))["llm"][2]
    assert verification.ranges["S"] == Range(1, 30, 30)


@pytest.mark.parametrize("tokens", [1, 7, 40, 320])
def test_the_profile_of_images_has_room_for_the_windows_of_every_grid(tokens):
    side = WINDOWS.window_tokens
    grids = [(rows, columns) for rows in range(1, tokens + 1) for columns in range(1, tokens // rows + 1)]
    most = max(-(-rows // side) * -(-columns // side) for rows, columns in grids)
    assert windows(WINDOWS, tokens).high == most
