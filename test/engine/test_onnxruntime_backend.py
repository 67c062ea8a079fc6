# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from onnx import TensorProto

from edgellm_ros.engine.device import CpuDevice, on_device
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.onnxruntime.session import available_cores, open_session, run_options
from fixtures.graphs import helper, save_model

ONNX_RUNTIME = pytest.mark.only_on("cpu", "cuda", reason="TensorRT loads plans")


@ONNX_RUNTIME
def test_a_missing_file_is_named(device, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.onnx not found"):
        EngineExecutor.open(tmp_path / "none.onnx", device)


@ONNX_RUNTIME
def test_a_damaged_file_is_named(device, tmp_path):
    (tmp_path / "bad.onnx").write_bytes(b"no graph at all")
    with pytest.raises(EngineError, match=r"bad\.onnx: ONNX Runtime .* cannot load the graph"):
        EngineExecutor.open(tmp_path / "bad.onnx", device)


def test_an_engine_that_fails_because_its_device_is_lost_says_so(tmp_path):
    class LostDevice(CpuDevice):
        def synchronize(self):
            raise DeviceLostError("only a new process can use it again")

    (tmp_path / "bad.onnx").write_bytes(b"no graph at all")
    with pytest.raises(DeviceLostError, match=r"bad\.onnx: ONNX Runtime .* \(only a new process can use it"):
        EngineExecutor.open(tmp_path / "bad.onnx", LostDevice())


def test_a_type_that_tensors_cannot_have_is_named(device, tmp_path):
    path = save_model(
        tmp_path / "text.onnx",
        [helper.make_node("Identity", ["x"], ["y"])],
        {"x": (TensorProto.STRING, [1])},
        {"y": (TensorProto.STRING, [1])},
    )
    with pytest.raises(EngineError, match=r"x has type tensor\(string\)"):
        EngineExecutor.open(path, device)


def test_threads_are_one_per_core_that_the_process_may_use():
    assert available_cores() >= 1


def test_threads_that_wait_for_work_sleep_soon(tmp_path):
    """Spinning threads take the cores from other processes, as on a robot."""
    weight = np.ones((1024, 1024), np.float32)
    path = save_model(
        tmp_path / "product.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        {"x": (TensorProto.FLOAT, [64, 1024])},
        {"y": (TensorProto.FLOAT, [64, 1024])},
        {"w": weight},
    )
    session = open_session(path, threads=4)

    def processor_time_after_a_run() -> float:
        session.run(None, {"x": weight[:64]})
        start = time.process_time()
        time.sleep(0.1)
        return time.process_time() - start

    # the least of three: threads that earlier tests have left may work meanwhile
    assert min(processor_time_after_a_run() for _ in range(3)) < 0.005


@pytest.mark.slow
def test_the_core_imports_neither_onnxruntime_nor_ros_nor_torch():
    program = (
        "import sys, edgellm_ros.runtime.inference_runtime\n"
        "loaded = {'onnxruntime', 'onnx_ir', 'torch', 'transformers', 'rclpy'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.only_on("cpu", reason="runs on a GPU are queued")
def test_an_interrupted_engine_fails_soon_and_runs_again_afterwards(device, tmp_path):
    weight = np.eye(512, dtype=np.float32)
    names = ["x", *(f"x{index}" for index in range(300)), "y"]
    path = save_model(
        tmp_path / "long.onnx",
        [helper.make_node("MatMul", [one, "w"], [next_one]) for one, next_one in pairwise(names)],
        {"x": (TensorProto.FLOAT, [512, 512])},
        {"y": (TensorProto.FLOAT, [512, 512])},
        {"w": weight},
    )
    executor = EngineExecutor.open(path, device, threads=1)
    x, y = on_device(device, weight + 1), device.zeros((512, 512), np.float32)
    executor.prepare(0, {}, {"x": x, "y": y})
    start = time.perf_counter()
    executor.execute()
    whole = time.perf_counter() - start
    timer = threading.Timer(whole / 10, executor.interrupt)
    timer.start()
    with pytest.raises(EngineError, match="terminate flag"):
        executor.execute()
    timer.join()
    with pytest.raises(EngineError, match="terminate flag"):
        executor.execute()
    device.fill_zero(y)
    executor.resume()
    executor.execute()
    np.testing.assert_array_equal(device.download(y), weight + 1)


def test_the_python_package_finds_what_it_looks_up_in_every_run():
    """A missing entry is an exception in each run, longer than a small run."""
    assert run_options(CpuDevice()).get_run_config_entry("gpu_graph_id") == "0"
