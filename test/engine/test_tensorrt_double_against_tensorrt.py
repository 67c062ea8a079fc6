# SPDX-License-Identifier: Apache-2.0
"""TensorRT's doubles and the real TensorRT for RTX give the same outcome.

The outcome is that of parsing, building and damaged plans. Every test runs the same calls on both doubles and
on the real library. TensorRT itself is not installed; TensorRT for RTX has the same interface, and its
builder is that of TensorRT 11.4. Only what needs no GPU can be compared: not what a plan that was loaded does
(ICudaEngine, IRuntimeConfig, IExecutionContext, IRuntimeCache).
"""

from __future__ import annotations

import enum
import importlib
import logging
import struct
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest

from doubles import tensorrt_double, tensorrt_rtx_double
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.onnx_bindings import read_bindings
from edgellm_ros.engine.tensorrt import rtx as tensorrt_rtx
from edgellm_ros.engine.tensorrt.backend import _numpy_type
from edgellm_ros.engine.tensorrt.library import library_log
from fixtures.graphs import BOOL, FLOAT, INT64, helper, linear_with_cache, make_model, save_model

pytestmark = [
    pytest.mark.only_on("cpu", reason="nothing here runs on a device"),
    pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX:DeprecationWarning"),
]
needs_rtx = pytest.mark.skipif(
    find_spec("tensorrt_rtx") is None,
    reason="tensorrt_rtx_cu13 has no wheel for this Python or machine (requirements-test.txt)",
)
DOUBLES = {"double of TensorRT": tensorrt_double, "double of TensorRT for RTX": tensorrt_rtx_double}
REAL = pytest.param("tensorrt_rtx", marks=needs_rtx, id="TensorRT for RTX")
Sizes = tuple[int, ...]
RIGHT = {
    "x": ((1, 1, 4), (1, 2, 4), (4, 8, 4)),
    "write_index": ((1,), (1,), (4,)),
    "cache": ((1, 1, 8, 4), (1, 1, 8, 4), (4, 1, 8, 4)),
}


def cases(table: dict[str, Any]) -> list[Any]:
    """Return the table's values as parameters, named by its keys."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), id=name) for name, v in table.items()]


def module(name: str) -> ModuleType:
    return DOUBLES.get(name) or importlib.import_module(name)


class Bench:
    """A builder of a library with its log."""

    def __init__(self, library: ModuleType) -> None:
        self.library = library
        self.log = library_log(library)
        self.builder = library.Builder(self.log)
        self.is_double = library in DOUBLES.values()

    def parse(self, path, accepted: bool = True) -> tuple[Any, Any]:
        """Return network and parser."""
        network = self.builder.create_network(
            1 << int(self.library.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        )
        parser = self.library.OnnxParser(network, self.log)
        self.log.take()
        assert parser.parse_from_file(str(path)) is accepted
        assert self.log.failed is not accepted
        return network, parser

    def config(self, gpus=("SM89",)) -> Any:
        config = self.builder.create_builder_config()
        if hasattr(config, "set_compute_capability"):
            config.num_compute_capabilities = len(gpus)
            for i, gpu in enumerate(gpus):
                assert config.set_compute_capability(getattr(self.library.ComputeCapability, gpu), i)
        return config

    def with_profile(self, config, shapes: dict[str, tuple[Sizes, Sizes, Sizes]]) -> Any:
        profile = self.builder.create_optimization_profile()
        for name, sizes in shapes.items():
            assert profile.set_shape(name, *sizes) is None
        assert config.add_optimization_profile(profile) == 0
        return config

    def build(self, network, config) -> Any:
        """Return the plan; None if the library logs an error."""
        self.log.take()
        plan = self.builder.build_serialized_network(network, config)
        assert self.log.failed is (plan is None)
        return plan

    def plan(self, path) -> bytes:
        network, _parser = self.parse(path)
        plan = self.build(network, self.with_profile(self.config(), RIGHT))
        return bytes(memoryview(plan))


@pytest.fixture(params=[*DOUBLES, REAL])
def bench(request) -> Bench:
    return Bench(module(request.param))


@pytest.fixture(params=["double of TensorRT for RTX", REAL])
def rtx(request) -> Bench:
    return Bench(module(request.param))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("linear") / "model.onnx"
    onnx.save(linear_with_cache(), path)
    return path


def three(*sizes: int) -> tuple[Sizes, Sizes, Sizes]:
    return (sizes, sizes, sizes)


class TestProfiles:
    @staticmethod
    def fate(bench: Bench, path, shapes) -> str:
        """Return the stage at which a profile is refused, and how: or "built"."""
        profile, config = bench.builder.create_optimization_profile(), bench.config()
        for name, sizes in shapes.items():
            try:
                profile.set_shape(name, *sizes)
            except Exception as error:
                return f"set_shape: {type(error).__name__}"
        bench.log.take()
        if config.add_optimization_profile(profile) == -1:
            assert bench.log.failed
            return "not added"
        assert not bench.log.failed
        network, _parser = bench.parse(path)
        return "not built" if bench.build(network, config) is None else "built"

    @pytest.mark.parametrize(
        ("changes", "fate"),
        cases(
            {
                "right": ({}, "built"),
                "min over opt": ({"x": ((1, 3, 4), (1, 2, 4), (4, 8, 4))}, "not added"),
                "opt over max": ({"x": ((1, 1, 4), (1, 9, 4), (4, 8, 4))}, "not added"),
                "other ranks of min and max": ({"x": ((1, 1), (1, 2, 4), (4, 8, 4))}, "not added"),
                "negative": ({"x": ((-1, 1, 4), (1, 2, 4), (4, 8, 4))}, "set_shape: RuntimeError"),
                "nine dimensions": ({"x": three(*[1] * 9)}, "set_shape: TypeError"),
                "empty": (
                    {
                        "x": ((0, 1, 4), (1, 2, 4), (4, 8, 4)),
                        "write_index": ((0,), (1,), (4,)),
                        "cache": ((0, 1, 8, 4), (1, 1, 8, 4), (4, 1, 8, 4)),
                    },
                    "built",
                ),
                "too few dimensions": ({"x": ((1, 1), (1, 2), (4, 8))}, "not built"),
                "too many dimensions": ({"x": ((1, 1, 4, 1), (1, 2, 4, 1), (4, 8, 4, 1))}, "not built"),
                "no dimensions": ({"x": three()}, "not built"),
                "another size of a fixed dimension": ({"x": ((1, 1, 5), (1, 2, 5), (4, 8, 5))}, "not built"),
                "a range of a fixed dimension": ({"x": ((1, 1, 4), (1, 2, 4), (4, 8, 5))}, "not built"),
                "an unknown input": ({"z": three(1)}, "built"),
                "an output": ({"y": three(1, 1, 3)}, "built"),
            }
        ),
    )
    def test_a_profile_is_taken_or_refused_at_the_same_stage(self, bench, model, changes, fate):
        assert self.fate(bench, model, RIGHT | changes) == fate

    @pytest.mark.parametrize("name", RIGHT)
    def test_a_dynamic_input_without_shapes_is_not_built(self, bench, model, name):
        shapes = {other: sizes for other, sizes in RIGHT.items() if other != name}
        assert self.fate(bench, model, shapes) == "not built"

    @pytest.mark.parametrize(
        ("first", "second", "fate"),
        [
            ((1, 2, 4), (1, 2, 4), "built"),
            ((1, 2, 4), (1, 2, 3), "built"),  # from 1 to 3
            ((1, 2, 4), (2, 2, 8), "built"),  # from 2 to 4
            ((1, 1, 2), (2, 4, 4), "built"),  # 2
            ((1, 1, 4), (2, 2, 4), "not built"),  # the tuned sizes differ
            ((1, 2, 4), (1, 3, 4), "not built"),
            ((1, 4, 4), (1, 4, 3), "not added"),
            ((1, 4, 4), (1, 2, 3), "not built"),
            ((2, 2, 4), (1, 1, 4), "not built"),
            ((1, 1, 1), (2, 2, 2), "not built"),  # nothing in common
            ((1, 2, 3), (4, 5, 6), "not built"),
        ],
    )
    def test_inputs_of_one_symbol_need_a_range_in_common_and_one_tuned_size(
        self, bench, tmp_path, first, second, fate
    ):
        inputs = {"a": (FLOAT, ["B", 4]), "b": (FLOAT, ["B", 4])}
        path = save_model(
            tmp_path / "model.onnx",
            [helper.make_node("Neg", ["a"], ["y"]), helper.make_node("Neg", ["b"], ["z"])],
            inputs,
            {"y": (FLOAT, ["B", 4]), "z": (FLOAT, ["B", 4])},
        )
        shapes = {"a": tuple((size, 4) for size in first), "b": tuple((size, 4) for size in second)}
        assert self.fate(bench, path, shapes) == fate

    def test_a_network_with_dynamic_inputs_needs_a_profile(self, bench, model):
        network, _parser = bench.parse(model)
        assert bench.build(network, bench.config()) is None

    def test_a_network_without_dynamic_inputs_needs_no_profile(self, bench, tmp_path):
        path = save_model(
            tmp_path / "model.onnx",
            [helper.make_node("Neg", ["x"], ["y"])],
            {"x": (FLOAT, [2, 4])},
            {"y": (FLOAT, [2, 4])},
        )
        network, _parser = bench.parse(path)
        assert bench.build(network, bench.config()) is not None
        assert bench.build(network, bench.with_profile(bench.config(), {"x": three(2, 4)})) is not None
        assert bench.build(network, bench.with_profile(bench.config(), {"x": three(3, 4)})) is None

    def test_profiles_are_numbered_in_the_order_of_addition(self, bench):
        config = bench.config()
        profiles = [bench.builder.create_optimization_profile() for _ in range(3)]
        assert [config.add_optimization_profile(profile) for profile in profiles] == [0, 1, 2]


class TestParser:
    def test_tensors_have_the_names_shapes_and_types_of_the_graph(self, bench, model):
        if bench.is_double:
            engine = bench.library.Runtime(bench.log).deserialize_cuda_engine(bench.plan(model))
            is_input = bench.library.TensorIOMode.INPUT
            names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
            found = {
                name: (engine.get_tensor_mode(name) == is_input, engine.get_tensor_shape(name))
                for name in names
            }
            types = {name: engine.get_tensor_dtype(name) for name in names}
        else:
            network, _parser = bench.parse(model)
            inputs = [network.get_input(i) for i in range(network.num_inputs)]
            outputs = [network.get_output(i) for i in range(network.num_outputs)]
            found = {tensor.name: (tensor in inputs, tensor.shape) for tensor in inputs + outputs}
            types = {tensor.name: tensor.dtype for tensor in inputs + outputs}
        expected = {
            binding.name: (binding.is_input, tuple(d if isinstance(d, int) else -1 for d in binding.shape))
            for binding in read_bindings(model)
        }
        assert {name: (mode, tuple(shape)) for name, (mode, shape) in found.items()} == expected
        assert {name: _numpy_type(bench.library, dtype) for name, dtype in types.items()} == {
            binding.name: binding.dtype for binding in read_bindings(model)
        }

    def test_inputs_are_in_the_graph_s_order_also_those_that_nothing_uses(self, bench, tmp_path):
        path = save_model(
            tmp_path / "model.onnx",
            [helper.make_node("Neg", ["x"], ["y"])],
            {"unused": (INT64, ["N"]), "x": (FLOAT, ["N", 4]), "a": (BOOL, [2])},
            {"y": (FLOAT, ["N", 4])},
        )
        network, _parser = bench.parse(path)
        inputs = [network.get_input(i) for i in range(network.num_inputs)]
        assert [(tensor.name, tuple(tensor.shape)) for tensor in inputs] == [
            ("unused", (-1,)),
            ("x", (-1, 4)),
            ("a", (2,)),
        ]

    @pytest.mark.parametrize("index", [-1, 99])
    def test_an_index_out_of_range_is_none_and_an_error(self, bench, model, index):
        network, _parser = bench.parse(model)
        for get in (network.get_input, network.get_layer):
            bench.log.take()
            assert get(index) is None
            assert bench.log.failed

    def test_every_unknown_operator_is_an_error_with_its_node(self, bench, tmp_path):
        path = save_model(
            tmp_path / "model.onnx",
            [
                helper.make_node("Neg", ["x"], ["a"], name="first"),
                helper.make_node("Unknown", ["a"], ["b"], name="second"),
                helper.make_node("Missing", ["b"], ["y"], name="third"),
            ],
            {"x": (FLOAT, ["N"])},
            {"y": (FLOAT, None)},
        )
        _network, parser = bench.parse(path, accepted=False)
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        assert [(error.node_operator(), error.node_name()) for error in errors] == [
            ("Unknown", "second"),
            ("Missing", "third"),
        ]
        assert all("Plugin not found" in error.desc() for error in errors)

    @pytest.mark.parametrize(("operator", "accepted"), [("Gelu", True), ("Frob", False)])
    def test_the_operator_s_domain_does_not_matter_to_the_parser(self, bench, tmp_path, operator, accepted):
        graph = make_model(
            [helper.make_node(operator, ["x"], ["y"], name="here", domain="com.microsoft")],
            {"x": (FLOAT, ["N"])},
            {"y": (FLOAT, ["N"])},
        )
        graph.opset_import.append(helper.make_opsetid("com.microsoft", 1))
        onnx.save(graph, tmp_path / "model.onnx")
        bench.parse(tmp_path / "model.onnx", accepted)

    @pytest.mark.parametrize("contents", [None, b"no ONNX file " * 50], ids=["missing", "garbage"])
    def test_a_file_that_is_not_onnx_is_one_error_without_a_node(self, bench, tmp_path, contents):
        path = tmp_path / "model.onnx"
        if contents is not None:
            path.write_bytes(contents)
        network, parser = bench.parse(path, accepted=False)
        assert (network.num_inputs, parser.num_errors) == (0, 1)
        error = parser.get_error(0)
        assert (error.node_operator(), error.node_name()) == ("", "")
        assert error.desc()

    def test_a_folder_is_not_parsed(self, bench, tmp_path):
        bench.parse(tmp_path, accepted=False)

    def test_an_empty_file_is_an_empty_network(self, bench, tmp_path):
        (tmp_path / "model.onnx").write_bytes(b"")
        network, _parser = bench.parse(tmp_path / "model.onnx")
        assert network.num_inputs == 0

    def test_a_parser_parses_one_file(self, bench, model):
        network, parser = bench.parse(model)
        assert not parser.parse_from_file(str(model))
        assert network.num_inputs == 3


class TestAttention:
    @pytest.fixture
    def attention(self, tmp_path):
        """An attention in fp32, for which there is no fused kernel, between other layers."""
        return save_model(
            tmp_path / "model.onnx",
            [
                helper.make_node("Neg", ["q"], ["query"]),
                helper.make_node("Attention", ["query", "k", "v"], ["attended"]),
                helper.make_node("Neg", ["attended"], ["y"]),
            ],
            {name: (FLOAT, ["B", 2, "S", 8]) for name in "qkv"},
            {"y": (FLOAT, ["B", 2, "S", 8])},
        )

    def outputs(self, bench: Bench, network) -> list[Any]:
        layers = [network.get_layer(i) for i in range(network.num_layers)]
        return [layer for layer in layers if layer.type == bench.library.LayerType.ATTENTION_OUTPUT]

    def test_each_attention_has_one_output_layer_which_becomes_its_class(self, bench, attention):
        network, _parser = bench.parse(attention)
        (layer,) = self.outputs(bench, network)
        assert not isinstance(layer, bench.library.IAttentionOutputLayer)
        layer.__class__ = bench.library.IAttentionOutputLayer
        assert layer.attention.decomposable is False

    @pytest.mark.parametrize("decomposable", [False, True])
    def test_without_a_fused_kernel_an_attention_must_be_decomposable(self, bench, attention, decomposable):
        network, _parser = bench.parse(attention)
        (layer,) = self.outputs(bench, network)
        layer.__class__ = bench.library.IAttentionOutputLayer
        layer.attention.decomposable = decomposable
        shapes = {name: ((1, 2, 1, 8), (1, 2, 4, 8), (4, 2, 16, 8)) for name in "qkv"}
        plan = bench.build(network, bench.with_profile(bench.config(), shapes))
        assert (plan is not None) is decomposable


class TestCaches:
    @staticmethod
    def aliases(bench: Bench, network) -> dict[str, str]:
        """Return the input of each output that is updated in place, as the network says."""
        if bench.is_double:
            return network._aliases
        layers = [network.get_layer(i) for i in range(network.num_layers)]
        updates = [layer for layer in layers if layer.type == bench.library.LayerType.KV_CACHE_UPDATE]
        return {layer.get_output(0).name: layer.get_input(0).name for layer in updates}

    @staticmethod
    def update(cache: str, result: str) -> onnx.NodeProto:
        return helper.make_node("TensorScatter", [cache, "update", "index"], [result], axis=-2)

    def test_an_update_of_a_cache_is_in_place(self, bench, model):
        network, _parser = bench.parse(model)
        assert self.aliases(bench, network) == {"present": "cache"}

    @pytest.mark.parametrize(
        ("nodes", "outputs", "built"),
        cases(
            {
                "an output": ([update("cache", "present")], ["present"], True),
                "an output that is also used": (
                    [update("cache", "present"), helper.make_node("Neg", ["present"], ["y"])],
                    ["y", "present"],
                    True,
                ),
                "beside another use of the cache": (
                    [update("cache", "present"), helper.make_node("Neg", ["cache"], ["y"])],
                    ["y", "present"],
                    True,
                ),
                "no output": (
                    [update("cache", "present"), helper.make_node("Neg", ["present"], ["y"])],
                    ["y"],
                    False,
                ),
                "a copy is the output": (
                    [update("cache", "updated"), helper.make_node("Identity", ["updated"], ["y"])],
                    ["y"],
                    False,
                ),
                "of a computed cache": (
                    [helper.make_node("Neg", ["cache"], ["computed"]), update("computed", "present")],
                    ["present"],
                    False,
                ),
                "two of one cache": (
                    [update("cache", "present"), update("cache", "other")],
                    ["present", "other"],
                    False,
                ),
                "one after another": (
                    [update("cache", "updated"), update("updated", "present")],
                    ["present"],
                    False,
                ),
            }
        ),
    )
    def test_an_update_is_built_only_from_an_input_to_an_output(self, bench, tmp_path, nodes, outputs, built):
        inputs = {
            "cache": (FLOAT, ["B", 1, 8, 4]),
            "update": (FLOAT, ["B", 1, "S", 4]),
            "index": (INT64, ["B"]),
        }
        results = {name: (FLOAT, ["B", 1, 8, 4]) for name in outputs}
        network, _parser = bench.parse(save_model(tmp_path / "model.onnx", nodes, inputs, results))
        shapes = {
            "cache": three(1, 1, 8, 4),
            "update": ((1, 1, 1, 4), (1, 1, 1, 4), (1, 1, 8, 4)),
            "index": three(1),
        }
        plan = bench.build(network, bench.with_profile(bench.config(), shapes))
        assert (plan is not None) is built


class TestConfiguration:
    @pytest.fixture
    def network(self, bench, model):
        network, parser = bench.parse(model)
        yield network
        del parser  # owns the weights

    @pytest.fixture
    def rtx_network(self, rtx, model):
        network, parser = rtx.parse(model)
        yield network
        del parser

    @pytest.mark.parametrize(("size", "built"), [(0, False), (1 << 20, False), (1 << 30, True)])
    def test_a_workspace_that_is_too_small_is_not_built(self, bench, network, size, built):
        config = bench.with_profile(bench.config(), RIGHT)
        config.set_memory_pool_limit(workspace(bench), size)
        assert (bench.build(network, config) is not None) is built

    def test_flags_may_be_set_and_cleared_again_and_again(self, bench, network):
        config, flags = bench.with_profile(bench.config(), RIGHT), bench.library.BuilderFlag
        for _ in range(2):
            assert config.clear_flag(flags.TF32) is None
        for _ in range(2):
            assert config.set_flag(flags.TF32) is None
        assert bench.build(network, config) is not None

    def test_a_timing_cache_can_be_set_and_read(self, bench):
        config = bench.config()
        assert config.get_timing_cache() is None
        assert config.set_timing_cache(config.create_timing_cache(b""), False) is True
        assert memoryview(config.get_timing_cache().serialize()).nbytes >= 0

    def test_a_version_compatible_plan_of_tensorrt_for_rtx_is_not_built(self, rtx, rtx_network):
        config, flag = rtx.with_profile(rtx.config(), RIGHT), rtx.library.BuilderFlag.VERSION_COMPATIBLE
        config.set_flag(flag)
        assert rtx.build(rtx_network, config) is None
        config.clear_flag(flag)
        assert rtx.build(rtx_network, config) is not None

    def test_a_plan_may_require_memory_of_the_user(self, rtx, rtx_network):
        config = rtx.with_profile(rtx.config(), RIGHT)
        config.set_flag(rtx.library.BuilderFlag.REQUIRE_USER_ALLOCATION)
        assert rtx.build(rtx_network, config) is not None

    @pytest.mark.parametrize("gpus", [(), ("SM86", "SM89"), ("SM89", "SM89")])
    def test_a_plan_may_be_for_any_gpu_for_several_or_for_one_twice(self, rtx, rtx_network, gpus):
        assert rtx.build(rtx_network, rtx.with_profile(rtx.config(gpus), RIGHT)) is not None

    def test_a_gpu_that_is_not_named_is_not_built(self, rtx, rtx_network):
        config = rtx.with_profile(rtx.config(), RIGHT)
        config.num_compute_capabilities = 2
        assert rtx.build(rtx_network, config) is None
        config.num_compute_capabilities = 1
        assert rtx.build(rtx_network, config) is not None

    @pytest.mark.parametrize(
        ("number", "gpu", "index", "taken"),
        [
            (0, "SM86", 0, False),
            (2, "SM86", 1, True),
            (2, "SM86", 2, False),
            (2, "SM86", -1, False),
            (1, "NONE", 0, False),
            (1, "CURRENT", 0, True),
            (2, "CURRENT", 0, False),
        ],
    )
    def test_a_gpu_that_is_refused_is_an_error(self, rtx, number, gpu, index, taken):
        config = rtx.builder.create_builder_config()
        assert config.num_compute_capabilities == 0
        config.num_compute_capabilities = number
        rtx.log.take()
        capability = getattr(rtx.library.ComputeCapability, gpu)
        assert config.set_compute_capability(capability, index) is taken
        assert rtx.log.failed is not taken

    @pytest.mark.parametrize(("number", "error"), [(-1, ValueError), ("1", TypeError), (1.0, TypeError)])
    def test_a_wrong_number_of_gpus_is_refused(self, rtx, number, error):
        config = rtx.builder.create_builder_config()
        with pytest.raises(error):
            config.num_compute_capabilities = number


class TestPlans:
    def test_the_header_has_size_and_version(self, bench, model):
        plan = bench.plan(model)
        assert int.from_bytes(plan[16:24], "little") == len(plan)
        assert ".".join(map(str, plan[24:28])) == bench.library.__version__

    def test_plans_of_tensorrt_for_rtx_have_a_mark_of_their_own(self, rtx, model):
        assert rtx.plan(model)[:4] == b"vtrt"

    def test_a_view_of_the_library_s_memory_has_its_bytes_but_does_not_equal_them(self, bench, model):
        network, _parser = bench.parse(model)
        memory = bench.build(network, bench.with_profile(bench.config(), RIGHT))
        contents = bytes(memoryview(memory))
        assert memory.nbytes == memoryview(memory).nbytes == len(contents)
        assert memoryview(memory).cast("B") == contents
        try:
            assert memoryview(memory) != contents
        except struct.error:
            assert not bench.is_double

    def test_kernels_in_the_library_s_memory_are_written_only_if_they_changed(self, bench, model, tmp_path):
        network, _parser = bench.parse(model)
        memory = bench.build(network, bench.with_profile(bench.config(), RIGHT))

        class Cache:
            def serialize(self):
                return memory

        path = tmp_path / "kernels"
        tensorrt_rtx._save(Cache(), path, CpuDevice(), None)
        assert path.read_bytes() == bytes(memoryview(memory))
        written = path.stat().st_ino
        tensorrt_rtx._save(Cache(), path, CpuDevice(), None)
        assert path.stat().st_ino == written

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "damage",
        cases(
            {
                "empty": lambda plan: b"",
                "only the mark": lambda plan: plan[:4],
                "only the header": lambda plan: plan[:28],
                "text": lambda plan: b"no plan at all " * 100,
                "zeros": lambda plan: bytes(1000),
                "another mark": lambda plan: b"none" + plan[4:],
                "truncated": lambda plan: plan[:-1],
                "half": lambda plan: plan[: len(plan) // 2],
                "too long": lambda plan: plan + b"x",
            }
        ),
    )
    def test_a_damaged_plan_is_none_and_an_error(self, bench, model, damage):
        runtime = bench.library.Runtime(bench.log)
        damaged = damage(bench.plan(model))
        bench.log.take()
        assert runtime.deserialize_cuda_engine(damaged) is None
        assert bench.log.failed


def workspace(bench: Bench) -> Any:
    return bench.library.MemoryPoolType.WORKSPACE


class TestArguments:
    @pytest.mark.parametrize(
        "call",
        cases({
            "flags in words": lambda b, n, c, p: b.builder.create_network("STRONGLY_TYPED"),
            "flags as a fraction": lambda b, n, c, p: b.builder.create_network(1.0),
            "a builder without a log": lambda b, n, c, p: b.library.Builder(None),
            "a runtime without a log": lambda b, n, c, p: b.library.Runtime(None),
            "a parser without a log": lambda b, n, c, p: b.library.OnnxParser(n, None),
            "a parser without a network": lambda b, n, c, p: b.library.OnnxParser(None, b.log),
            "an input by name": lambda b, n, c, p: n.get_input("x"),
            "a layer by name": lambda b, n, c, p: n.get_layer("x"),
            "a number for a name": lambda b, n, c, p: p.set_shape(5, (1,), (1,), (1,)),
            "text for sizes": lambda b, n, c, p: p.set_shape("x", "1", (1,), (1,)),
            "text in sizes": lambda b, n, c, p: p.set_shape("x", ("1",), (1,), (1,)),
            "fractions in sizes": lambda b, n, c, p: p.set_shape("x", (1.0,), (1,), (1,)),
            "one size alone": lambda b, n, c, p: p.set_shape("x", 1, 1, 1),
            "no sizes": lambda b, n, c, p: p.set_shape("x", None, None, None),
            "no largest size": lambda b, n, c, p: p.set_shape("x", (1,), (1,)),
            "text for a profile": lambda b, n, c, p: c.add_optimization_profile("x"),
            "a number for a flag": lambda b, n, c, p: c.set_flag(6),
            "text for a flag": lambda b, n, c, p: c.set_flag("TF32"),
            "no flag": lambda b, n, c, p: c.clear_flag(None),
            "a number for a pool": lambda b, n, c, p: c.set_memory_pool_limit(0, 5),
            "text for a size": lambda b, n, c, p: c.set_memory_pool_limit(workspace(b), "5"),
            "text for a cache": lambda b, n, c, p: c.create_timing_cache("x"),
            "no cache": lambda b, n, c, p: c.set_timing_cache(None, False),
            "no configuration": lambda b, n, c, p: b.builder.build_serialized_network(n, None),
            "no network": lambda b, n, c, p: b.builder.build_serialized_network(None, c),
            "text for a plan": lambda b, n, c, p: b.library.Runtime(b.log).deserialize_cuda_engine("x"),
            "no plan": lambda b, n, c, p: b.library.Runtime(b.log).deserialize_cuda_engine(None),
        }),
    )  # fmt: skip
    def test_arguments_of_a_wrong_type_are_refused(self, bench, call):
        network, config = bench.builder.create_network(), bench.config()
        with pytest.raises(TypeError):
            call(bench, network, config, bench.builder.create_optimization_profile())

    def test_a_path_is_no_text(self, bench, model):
        parser = bench.library.OnnxParser(bench.builder.create_network(), bench.log)
        with pytest.raises(TypeError):
            parser.parse_from_file(model)

    @pytest.mark.parametrize("arguments", [("SM86", 0), (86, 0), (None, 0), ("right", "0"), ("right", 0.0)])
    def test_a_gpu_of_a_wrong_type_is_refused(self, rtx, arguments):
        gpu, index = arguments
        config = rtx.config()
        with pytest.raises(TypeError):
            config.set_compute_capability(
                rtx.library.ComputeCapability.SM86 if gpu == "right" else gpu, index
            )

    def test_sizes_may_be_lists_or_numbers_of_numpy(self, bench):
        profile = bench.builder.create_optimization_profile()
        profile.set_shape("x", [1], (np.int64(2),), (True + 2,))

    @pytest.mark.parametrize("flags", [1 << 20, 8])
    def test_unknown_flags_of_a_network_are_none_and_an_error(self, bench, flags):
        bench.log.take()
        assert bench.builder.create_network(flags) is None
        assert bench.log.failed

    @needs_rtx
    @pytest.mark.parametrize(
        ("title", "name"),
        [
            (title, name)
            for title, double in DOUBLES.items()
            for name, value in vars(double).items()
            if isinstance(value, type) and issubclass(value, enum.Enum)
        ],
    )
    def test_the_double_s_enumerations_have_the_library_s_values(self, title, name):
        real, double = getattr(module("tensorrt_rtx"), name), getattr(module(title), name)
        values = {member: int(real.__members__[member]) for member in double.__members__}
        assert values == {member: value.value for member, value in double.__members__.items()}


class TestLog:
    def test_messages_come_with_a_severity_and_text(self, bench, model, monkeypatch):
        messages = []
        monkeypatch.setattr(bench.log, "log", lambda severity, text: messages.append((severity, text)))
        network, _parser = self.parsed(bench, model)
        assert bench.builder.build_serialized_network(network, bench.config()) is None
        severities = [severity for severity, _ in messages]
        assert bench.library.ILogger.Severity.ERROR in severities
        assert all(isinstance(severity, bench.library.ILogger.Severity) for severity in severities)
        assert any("no optimization profile has been defined" in text for _, text in messages)

    @staticmethod
    def parsed(bench: Bench, model) -> tuple[Any, Any]:
        network = bench.builder.create_network()
        parser = bench.library.OnnxParser(network, bench.log)
        assert parser.parse_from_file(str(model))
        return network, parser

    def test_severities_are_ordered_from_the_worst(self, bench):
        severity = bench.library.ILogger.Severity
        names = ["INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"]
        assert [int(getattr(severity, name)) for name in names] == list(range(5))

    def test_errors_reach_python_s_logging(self, bench, caplog):
        with caplog.at_level(logging.DEBUG):
            assert bench.builder.create_network(1 << 20) is None
        assert "TensorRT: " in caplog.text
        assert "flagSet" in bench.log.take()

    def test_a_log_that_does_not_call_the_base_s_init_is_refused_when_it_is_made(self, bench):
        class Log(bench.library.ILogger):
            def __init__(self):
                pass

            def log(self, severity, msg):
                pass

        with pytest.raises(TypeError, match=r"__init__\(\) must be called when overriding __init__"):
            Log()
