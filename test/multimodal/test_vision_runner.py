# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.onnxruntime.session import open_session
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.kernels import load_kernels
from edgellm_ros.multimodal import vision_runner
from edgellm_ros.multimodal.image_processor import make_image_processor
from edgellm_ros.multimodal.vision_runner import VisionRunner
from fixtures.on_device import assert_same_up_to_rounding
from fixtures.pixel_values import pixel_values
from fixtures.qwen2_5_vl_checkpoint import write_qwen2_5_vl_checkpoint
from fixtures.reference_inputs import make_image


@pytest.fixture(scope="module")
def runner(device, tiny_engine) -> VisionRunner:
    config = EngineConfig.load(tiny_engine).vision
    executor = EngineExecutor.open(tiny_engine / "visual" / "model.onnx", device)
    return VisionRunner(executor, config, device, load_kernels(device), 40)


@pytest.fixture(scope="module")
def windows_engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    export(write_qwen2_5_vl_checkpoint(folder / "checkpoint"), folder / "engine")
    return folder / "engine"


@pytest.fixture(scope="module")
def encode(device, runner):
    """Function: image -> rows of embeddings, then of each deepstack level."""

    def run(image) -> list[np.ndarray]:
        rows, columns = runner.token_grid(image)
        outputs = [device.zeros((rows * columns, 48), np.float32) for _ in range(3)]
        runner.encode(image, outputs[0], outputs[1:])
        return [device.download(output) for output in outputs]

    return run


def test_an_image_becomes_one_row_per_merge_block_and_deepstack_level(runner, encode):
    assert runner.token_grid(make_image(48, 64)) == (3, 4)
    image_rows, *deepstack = encode(make_image(48, 64))
    assert np.isfinite(image_rows).all()
    assert image_rows.std() > 0
    assert all(level.std() > 0 for level in deepstack)


def test_the_same_image_gives_the_same_rows_whatever_came_before(encode):
    first = encode(make_image(48, 64))
    encode(make_image(100, 60))
    for before, after in zip(first, encode(make_image(48, 64)), strict=True):
        np.testing.assert_array_equal(before, after)


def test_positions_of_recent_grids_are_kept(runner, encode, monkeypatch):
    monkeypatch.setattr(vision_runner, "MAX_CACHED_GRIDS", 2)
    made = []
    original = runner._processor.grid_inputs
    monkeypatch.setattr(runner._processor, "grid_inputs", lambda grid: made.append(grid) or original(grid))
    runner._grid_inputs.clear()
    wide, tall, narrow = make_image(48, 64), make_image(64, 48), make_image(20, 150)
    for image in (wide, tall, wide, narrow, wide, tall):
        encode(image)
    assert len(made) == 4  # `narrow` had evicted `tall`


def test_an_image_of_too_many_tokens_is_an_error_that_names_both(device, tiny_engine):
    config = EngineConfig.load(tiny_engine).vision
    executor = EngineExecutor.open(tiny_engine / "visual" / "model.onnx", device)
    with pytest.raises(ValueError, match="64x48 pixels becomes 12 tokens, the engine takes at most 10"):
        VisionRunner(executor, config, device, load_kernels(device), 10).token_grid(make_image(48, 64))


@pytest.mark.parametrize("size", [(64, 64), (66, 130), (17, 150)], ids=["whole", "cut off", "one row"])
def test_a_tower_with_windows_gives_the_rows_of_its_graph(device, windows_engine, size):
    config, image = EngineConfig.load(windows_engine).vision, make_image(*size)
    model = windows_engine / "visual" / "model.onnx"
    runner = VisionRunner(EngineExecutor.open(model, device), config, device, load_kernels(device), 320)
    grid = runner.token_grid(image)
    rows = device.zeros((grid[0] * grid[1], config.out_hidden_size), np.float32)
    runner.encode(image, rows, [])
    processor = make_image_processor(config)
    inputs = {"pixel_values": pixel_values(processor, image), **processor.grid_inputs(grid)}
    (expected,) = open_session(model).run(None, inputs)
    assert_same_up_to_rounding(device.download(rows), expected)
