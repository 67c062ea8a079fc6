# SPDX-License-Identifier: Apache-2.0
"""Errors of a GPU: too little memory, and a device lost after a failed kernel."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from edgellm_ros.engine.errors import DeviceMemoryError
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.on_device import put

pytestmark = pytest.mark.only_on("cuda", "tensorrt", reason="the errors are those of a GPU")
TOO_MUCH = 1 << 50  # bytes
REQUEST = LLMGenerationRequest("go to the red box", sampling=SamplingParams(max_tokens=8))
LEAK = 8 << 20  # bytes

LOSE = """
import sys
import numpy as np
from cuda.core import LaunchConfig, Program, ProgramOptions, launch
from edgellm_ros.cli import main
from edgellm_ros.engine.device import open_device
from edgellm_ros.engine.errors import DeviceLostError
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest

NAME, ENGINE = sys.argv[1:]

def lose(device):
    "Queue a kernel that fails."
    code = 'extern "C" __global__ void fail() { asm("trap;"); }'
    program = Program(code, "c++", ProgramOptions(arch=device.arch)).compile("cubin")
    launch(device.stream, LaunchConfig(grid=1, block=1), program.get_kernel("fail"))

def must_fail(call, *arguments):
    try:
        call(*arguments)
    except DeviceLostError as error:
        print(type(error).__name__, error)
    else:
        sys.exit(f"{call} did not fail")
"""


def run_and_lose(device, engine, program: str) -> subprocess.CompletedProcess:
    """Run a program that loses the device, in a process of its own."""
    command = [sys.executable, "-c", LOSE + program, device.name, str(engine)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def assert_ended(done: subprocess.CompletedProcess, code: int) -> None:
    """Check that a process exited by itself, not by a signal or in library clean-up."""
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert "terminate" not in done.stderr


def test_too_large_an_allocation_is_an_error_and_the_device_still_works(device):
    with pytest.raises(DeviceMemoryError, match=f"{TOO_MUCH} bytes"):
        device.empty((TOO_MUCH // 4,), np.float32)
    tensor = put(device, [1.0, 2.0])
    assert device.download(tensor).tolist() == [1.0, 2.0]
    device.synchronize()


def test_a_runtime_that_does_not_fit_is_an_error_and_others_still_answer(tiny_engine, device):
    with LLMInferenceRuntime(tiny_engine, device) as runtime:
        before = runtime.handle_request(REQUEST)
        with pytest.raises(DeviceMemoryError, match=r"\d{10,} bytes"):
            LLMInferenceRuntime(tiny_engine, device, prefix_cache_bytes=TOO_MUCH)
        assert runtime.handle_request(REQUEST).token_ids == before.token_ids


def test_the_memory_of_a_closed_runtime_is_free_again(tiny_engine, device):
    def free_after_use() -> int:
        with LLMInferenceRuntime(tiny_engine, device) as runtime:
            runtime.handle_request(REQUEST)
        device.synchronize()
        return device.memory_info()[0]

    first = free_after_use()  # libraries do not free all of their memory
    assert first - min(free_after_use() for _ in range(5)) < LEAK


def test_memory_is_freed_with_the_last_reference_to_a_tensor(device):
    before, _ = device.memory_info()
    tensor = device.empty((1 << 30,), np.uint8)
    view = tensor.rows(0, 4)
    del tensor
    assert before - device.memory_info()[0] >= 1 << 30
    del view
    assert device.memory_info()[0] >= before


def test_every_call_on_a_lost_device_says_so_and_the_process_exits(device, tiny_engine):
    done = run_and_lose(
        device,
        tiny_engine,
        """
device = open_device(NAME)
tensor = device.zeros((4,), np.float32)
lose(device)
must_fail(device.download, tensor)
must_fail(device.synchronize)
must_fail(device.empty, (4,), np.float32)
must_fail(device.upload, tensor, np.zeros(4, np.float32))
must_fail(device.fill_zero, tensor)
sys.exit(7)
""",
    )
    assert_ended(done, 7)
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert all("only a new process can use it again" in line for line in lines)


def test_a_device_lost_during_an_answer_fails_it_and_the_process_exits(device, tiny_engine):
    done = run_and_lose(
        device,
        tiny_engine,
        """
device = open_device(NAME)
runtime = LLMInferenceRuntime(ENGINE, device)
runtime.handle_request(LLMGenerationRequest("hello"))

def watch(progress):
    if progress.stage == "decode" and progress.step == 2:
        lose(device)

must_fail(runtime.handle_request, LLMGenerationRequest("hello", on_progress=watch))
must_fail(runtime.handle_request, LLMGenerationRequest("hello"))
runtime.close()
must_fail(LLMInferenceRuntime, ENGINE, device)
sys.exit(7)
""",
    )
    assert_ended(done, 7)
    assert len(done.stdout.splitlines()) == 3


def test_a_command_whose_device_is_lost_prints_one_line(device, tiny_engine):
    done = run_and_lose(
        device,
        tiny_engine,
        """
answer = LLMInferenceRuntime.handle_request

def lose_and_answer(runtime, request):
    lose(runtime.pipeline.device)
    return answer(runtime, request)

LLMInferenceRuntime.handle_request = lose_and_answer
sys.exit(main(["generate", ENGINE, "--prompt", "go", "--device", NAME]))
""",
    )
    assert_ended(done, 2)
    assert done.stderr.splitlines()[-1].startswith("edgellm generate: error: ")
    assert done.stdout == ""
