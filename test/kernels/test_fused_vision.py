# SPDX-License-Identifier: Apache-2.0
"""A vision tower in the fused kernels against its graph.

ONNX Runtime runs the graph on the CPU in fp32. Without a GPU the kernels are compiled for the host, and
products are NumPy's.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

pytest.importorskip("cuda.core", reason="NVRTC and its bindings are not installed (requirements-test.txt)")

from doubles.fused_on_cpu import FusedDoubleDevice
from edgellm_ros.builder import export
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.errors import DeviceMemoryError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.fused.cuda import compiler
from edgellm_ros.fused.loading import agreement
from edgellm_ros.fused.loading import vision as loading
from edgellm_ros.fused.loading.backend import element_type
from edgellm_ros.fused.plan.vision import VisionPlan, VisionShape
from edgellm_ros.fused.sources import expand
from edgellm_ros.kernels import load_kernels
from edgellm_ros.multimodal.vision_runner import VisionRunner
from fixtures.fused_decoding import fused_on_host
from fixtures.internvl_checkpoint import write_internvl_checkpoint
from fixtures.ptxas_report import ptxas_report
from fixtures.reference_inputs import make_image
from fixtures.tiny_checkpoint import write_tiny_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.only_on("cpu", "cuda", reason="TensorRT has no fused kernels"),
    pytest.mark.kernel_doubles,
]
QWEN3_VL_2B = VisionShape(
    "fp16", depth=24, hidden=1024, heads=16, inner=4096, patch=768, merged=4096, raised=4096, out=2048,
    deepstack=(5, 11, 17), epsilon=1e-6, merger_epsilon=1e-6,
)  # fmt: skip
INTERNVL3_2B = VisionShape(
    "fp16", depth=24, hidden=1024, heads=16, inner=4096, patch=588, merged=4096, raised=1536, out=1536,
    deepstack=(), epsilon=1e-6, merger_epsilon=1e-5, tile=1025,
)  # fmt: skip
MOST_TOKENS = 120
TOLERANCE = {"fp16": 6e-3, "bf16": 4e-2}  # of the largest value


def write_tiles(directory: Path, **changes) -> None:
    """Write InternVL with class token, positions and layer scales of size 1."""
    write_internvl_checkpoint(directory, **changes)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("cls_token", "position_embeddings")):
            tensors[name] = tensor / tensor.std()
        elif "lambda_" in name:
            tensors[name] = tensor * 10
    save_file(tensors, path, metadata={"format": "pt"})


CHECKPOINTS = {
    "heads of 16": partial(write_tiny_checkpoint, vision={}),
    "heads of 64": partial(
        write_tiny_checkpoint, vision={"hidden_size": 192, "num_heads": 3, "intermediate_size": 320}
    ),
    "heads of 72, one deepstack level": partial(
        write_tiny_checkpoint,
        vision={
            "hidden_size": 144, "num_heads": 2, "intermediate_size": 168, "deepstack_visual_indexes": [1],
        },
    ),
    "tiles of 145 rows, heads of 64": partial(
        write_tiles, vision={"hidden_size": 128, "image_size": 72}, max_tiles=2
    ),
    "tiles of 10 rows, no biases and positions": partial(
        write_tiles,
        vision={
            "image_size": 18, "num_attention_heads": 4, "attention_bias": False, "layer_norm_eps": 0.5,
            "use_absolute_position_embeddings": False,
        },
        downsample_ratio=1 / 3,
    ),
    "tiles of 37 rows, heads of 72, not merged": partial(
        write_tiles,
        vision={"hidden_size": 144, "image_size": 36},
        downsample_ratio=1.0, max_tiles=1,
    ),
}  # fmt: skip


def encoded(runner: VisionRunner, image: np.ndarray, width: int, levels: int, dtype) -> list[np.ndarray]:
    """Encode an image; return its rows, then those of each deepstack level."""
    rows, columns = runner.token_grid(image)
    device = runner._device
    outputs = [device.zeros((rows * columns, width), dtype) for _ in range(1 + levels)]
    runner.encode(image, outputs[0], outputs[1:])
    return [device.download(output).astype(np.float32) for output in outputs]


@pytest.fixture(scope="module")
def make_towers(tmp_path_factory):
    """A function that makes engines of given sizes, in fp32 and a precision, once."""

    @functools.cache
    def make(sizes: str, precision: str) -> Path:
        root = tmp_path_factory.mktemp("towers")
        CHECKPOINTS[sizes](root / "checkpoint")
        for each in ("fp32", precision):
            export(root / "checkpoint", root / each, precision=each)
        return root

    return make


@pytest.fixture
def towers(make_towers):
    """The smallest tower in fp32 and fp16."""
    return make_towers("heads of 16", "fp16")


def runner_of(towers, device, tower=None) -> VisionRunner:
    """Make a runner of the fp32 graph on the CPU, or of the fused kernels on a device."""
    config = EngineConfig.load(towers / "fp32").vision
    executor = EngineExecutor.open(towers / "fp32" / "visual" / "model.onnx", CpuDevice())
    fused = None if tower is None else tower.executor
    device = CpuDevice() if tower is None else device
    return VisionRunner(executor, config, device, load_kernels(device), MOST_TOKENS, fused)


@pytest.mark.parametrize(
    "sizes, precision",
    [
        ("heads of 16", "fp16"),
        ("heads of 64", "bf16"),
        ("heads of 72, one deepstack level", "fp16"),
        ("tiles of 145 rows, heads of 64", "fp16"),
        ("tiles of 145 rows, heads of 64", "bf16"),
        ("tiles of 10 rows, no biases and positions", "fp16"),
        ("tiles of 37 rows, heads of 72, not merged", "fp16"),
    ],
)
def test_the_rows_are_those_of_the_graph(make_towers, device, sizes, precision):
    towers = make_towers(sizes, precision)
    config = EngineConfig.load(towers / precision)
    levels, width = config.vision.num_deepstack_features, config.vision.out_hidden_size
    reference = runner_of(towers, device)
    with fused_on_host() if device.memory != "cuda" else nullcontext():
        tower = loading.load_fused_vision(towers / precision, config, device, "auto")
        assert tower.executor is not None
        runner = runner_of(towers, device, tower)
        for image in (make_image(100, 130), make_image(50, 110), make_image(16, 16)):
            found = encoded(runner, image, width, levels, element_type(precision))
            expected = encoded(reference, image, width, levels, np.float32)
            for mine, theirs in zip(found, expected, strict=True):
                error = np.abs(mine - theirs).max() / np.abs(theirs).max()
                assert error < TOLERANCE[precision], f"relative error {error:.2g}"


@pytest.mark.only_on("cpu", reason="no kernels run")
@pytest.mark.parametrize(
    "vision", [{"norm_type": "rms_norm"}, {"use_qk_norm": True}, {"use_mean_pooling": False}], ids=str
)
def test_the_engine_encodes_tiles_of_other_towers(tmp_path, device, caplog, vision):
    caplog.set_level(logging.INFO)
    write_internvl_checkpoint(tmp_path / "checkpoint", vision=vision)
    export(tmp_path / "checkpoint", tmp_path / "engine", precision="fp16")
    config = EngineConfig.load(tmp_path / "engine")
    with fused_on_host():
        tower = loading.load_fused_vision(tmp_path / "engine", config, device, "auto")
    assert tower.executor is None
    assert "the engine encodes images: the engine has no visual/fused.json" in caplog.text


@pytest.mark.only_on("cpu", reason="the memory of the host")
def test_an_image_without_memory_is_refused_until_there_is_some(towers, device, monkeypatch):
    config = EngineConfig.load(towers / "fp16")
    outputs = config.vision.out_hidden_size, config.vision.num_deepstack_features, np.float16

    def none_left(device, shape, dtype):
        raise DeviceMemoryError("none left")

    with fused_on_host():
        tower = loading.load_fused_vision(towers / "fp16", config, device, "auto")
        runner = runner_of(towers, device, tower)
        with monkeypatch.context() as patch:
            patch.setattr(FusedDoubleDevice, "zeros", none_left)
            for _ in range(2):
                with pytest.raises(DeviceMemoryError, match="none left"):
                    encoded(runner, make_image(100, 130), *outputs)
        assert encoded(runner, make_image(100, 130), *outputs)[0].any()


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"heads": 2}, "heads have 512 values, not a multiple of 8 up to 128"),
        ({"inner": 4100}, "the feed-forward size 4100 is not a multiple of 8"),
        ({"dtype": "fp32"}, "weights are fp32, not fp16 or bf16"),
    ],
)
def test_a_tower_that_is_not_taken_has_a_reason(changes, reason):
    assert dataclasses.replace(QWEN3_VL_2B, **changes).unsupported() == reason


@pytest.mark.parametrize("shape", [QWEN3_VL_2B, INTERNVL3_2B], ids=["Qwen3-VL-2B", "InternVL3-2B"])
@pytest.mark.parametrize("arch", ["sm_90", "sm_87"])
def test_the_kernels_spill_no_registers(arch, shape):
    plan = VisionPlan(shape, 99 << 10)
    report = ptxas_report(expand(plan.source), compiler.options(arch, plan))
    assert "0 bytes spill stores" in report
    assert all("0 bytes spill stores" in line for line in report.splitlines() if "spill stores" in line)


@pytest.mark.only_on("cpu", reason="the kernels compiled for the host")
class TestChoice:
    """The kernels encode images if their rows are the engine's and they are faster."""

    def choose(self, towers, device, monkeypatch, times, factor=1.0, camera=(48, 64)):
        """Choose with these seconds of engine and kernels, and with rows times a factor.

        camera: height and width of its images; None = as they are.
        """
        config = EngineConfig.load(towers / "fp16")
        clock = iter(np.cumsum([each for pair in times for each in [0, pair] * (agreement.RUNS + 2)]))
        monkeypatch.setattr(agreement.time, "perf_counter", lambda: next(clock))
        if camera is not None:
            monkeypatch.setattr(loading, "CAMERA", camera)
            monkeypatch.setattr("edgellm_ros.multimodal.vision_runner.CAMERA", camera)
        with fused_on_host():
            tower = loading.load_fused_vision(towers / "fp16", config, device, "auto")
            runner = runner_of(towers, device, tower)
            width, levels = config.vision.out_hidden_size, config.vision.num_deepstack_features
            dtypes = {False: np.float32, True: np.float16}
            rows = {
                fused: [device.zeros((runner.camera_tokens, width), dtype) for _ in range(1 + levels)]
                for fused, dtype in dtypes.items()
            }
            encode = runner.encode

            def scaled(image, *outputs):
                encode(image, *outputs)
                if runner.uses_fused:
                    rows[True][0].array[...] *= factor

            def rows_of(tokens):
                first, *others = rows[runner.uses_fused]
                return first, others

            monkeypatch.setattr(runner, "encode", scaled)
            loading.choose_by_time(device, runner, rows_of)
        return runner.uses_fused

    def test_the_faster_one_encodes(self, towers, device, monkeypatch, caplog):
        caplog.set_level(logging.INFO)
        assert self.choose(towers, device, monkeypatch, [2e-3, 1e-3])
        assert (
            "the fused kernels encode images (ms per image of 64x48: 1.000 fused, 2.000 engine)"
            in caplog.text
        )
        assert not self.choose(towers, device, monkeypatch, [1e-3, 2e-3])

    def test_all_tiles_of_a_camera_image_are_compared(self, make_towers, device, monkeypatch, caplog):
        caplog.set_level(logging.INFO)
        towers = make_towers("tiles of 10 rows, no biases and positions", "fp16")
        assert self.choose(towers, device, monkeypatch, [2e-3, 1e-3], camera=None)
        assert "(ms per image of 640x480: 1.000 fused, 2.000 engine)" in caplog.text

    def test_kernels_with_wrong_rows_are_not_used(self, towers, device, monkeypatch, caplog):
        assert not self.choose(towers, device, monkeypatch, [2e-3, 1e-3], factor=3)
        assert "the engine encodes images: the rows of the fused kernels differ" in caplog.text
