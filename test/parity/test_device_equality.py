# SPDX-License-Identifier: Apache-2.0
"""The demo's model on a GPU: equality with the CPU, and how long a plan takes.

Training never saw the scenes.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import numpy as np
import pytest
from unseen_scenes import scenes

from edgellm_ros.builder import export
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse

pytestmark = pytest.mark.only_on("cuda", "tensorrt", reason="compares with the CPU")
SCENES = 50
LOGPROBS = 8
TOLERANCE = 1e-3  # of fp32; as against PyTorch
HALF_TOLERANCES = {"fp16": 2e-2, "bf16": 5e-2}  # relative; bf16 has three bits less
# Trajectories in fp16 after ten Euler steps: standard deviations and metres. ONNX Runtime in fp16 on a CPU:
# 0.09 and 0.002.
HALF_ACTIONS, HALF_PATHS = 0.15, 0.005
PLANS = 20
PLAN_SECONDS = 0.060


@pytest.fixture(scope="module")
def on_cpu(arena_engine):
    """fp32 on the CPU, the reference of everything here."""
    with LLMInferenceRuntime(arena_engine, "cpu", prefix_cache_bytes=0) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def on_gpu(arena_engine, device):
    with LLMInferenceRuntime(arena_engine, device, prefix_cache_bytes=0) as runtime:
        runtime.capture_decoding_cuda_graph()
        yield runtime


@pytest.fixture(scope="module")
def pairs(on_cpu, on_gpu) -> list[tuple[LLMGenerationResponse, LLMGenerationResponse]]:
    """Each scene's answers on the CPU and on the GPU."""
    requests = [scene.request(LOGPROBS) for scene in scenes(SCENES)]
    return [(on_cpu.handle_request(one), on_gpu.handle_request(one)) for one in requests]


def test_greedy_tokens_and_texts_are_those_of_the_cpu_in_every_scene(pairs):
    unequal = [
        i for i, (cpu, gpu) in enumerate(pairs) if (cpu.token_ids, cpu.text) != (gpu.token_ids, gpu.text)
    ]
    assert unequal == []


def test_log_probabilities_are_those_of_the_cpu(pairs, record_property):
    worst = 0.0
    for cpu, gpu in pairs:
        for expected, found in zip(cpu.logprobs, gpu.logprobs, strict=True):
            known = dict(expected)
            worst = max(worst, *(abs(value - known[token]) for token, value in found if token in known))
    record_property("logprobs", float(worst))
    print(f"largest difference of log-probabilities in {SCENES} scenes: {worst:.1e}")
    assert worst <= TOLERANCE


def test_trajectories_are_those_of_the_cpu(pairs, on_cpu, record_property):
    """The unit of actions is the standard deviation of the checkpoint's action space.

    Actions are compared after all Euler steps.
    """
    std = np.asarray(on_cpu.config.action.action_space.std)
    assert [cpu.actions is None for cpu, _ in pairs] == [gpu.actions is None for _, gpu in pairs]
    driving = [(cpu, gpu) for cpu, gpu in pairs if cpu.actions is not None]
    assert len(driving) > SCENES / 2  # else it would say little
    actions = max(np.abs((gpu.actions - cpu.actions) / std).max() for cpu, gpu in driving)
    paths = max(np.abs(gpu.paths - cpu.paths).max() for cpu, gpu in driving)
    record_property("actions", float(actions))
    print(
        f"largest difference in {len(driving)} trajectories: actions {actions:.1e} std, paths {paths:.1e} m"
    )
    assert actions <= TOLERANCE
    assert paths <= TOLERANCE


def first_logits(runtime, device, request: LLMGenerationRequest) -> np.ndarray:
    """The logits [V] of the answer's first token."""
    runtime.handle_request(replace(request, sampling=replace(request.sampling, max_tokens=1)))
    return device.download(runtime.pipeline.logits)[0, 0]


@pytest.mark.parametrize(("precision", "tolerance"), HALF_TOLERANCES.items())
def test_logits_in_half_precision_are_those_of_fp32_on_the_cpu(
    trained_checkpoint, on_cpu, device, tmp_path, record_property, precision, tolerance
):
    """Differences are relative, in the Euclidean norm and in the maximum norm.

    The former are relative to the whole vector of logits, the latter to the largest logit.
    """
    export(trained_checkpoint, tmp_path, precision=precision)
    euclidean, maximum = [], []
    with LLMInferenceRuntime(tmp_path, device, prefix_cache_bytes=0) as half:
        for scene in scenes(SCENES):
            one = scene.request()
            expected = first_logits(on_cpu, on_cpu.pipeline.device, one)
            difference = first_logits(half, device, one) - expected
            euclidean.append(np.linalg.norm(difference) / np.linalg.norm(expected))
            maximum.append(np.abs(difference).max() / np.abs(expected).max())
    record_property("euclidean", float(max(euclidean)))
    print(
        f"largest relative difference of {precision} logits: {max(euclidean):.1e} L2, "
        f"{max(maximum):.1e} largest"
    )
    assert max(euclidean) <= tolerance
    assert max(maximum) <= tolerance


@pytest.mark.only_on("cuda", reason="TensorRT has no fused decoding")
@pytest.mark.parametrize("decode", ["fused", "auto"])
def test_answers_of_the_fused_kernels_in_fp16_are_those_of_fp32_on_the_cpu(
    trained_checkpoint, on_cpu, device, tmp_path, record_property, decode
):
    export(trained_checkpoint, tmp_path, precision="fp16")
    std, distances = np.asarray(on_cpu.config.action.action_space.std), []
    with LLMInferenceRuntime(tmp_path, device, prefix_cache_bytes=0, decode=decode) as half:
        half.capture_decoding_cuda_graph()
        for scene in scenes(SCENES):
            expected, found = (runtime.handle_request(scene.request()) for runtime in (on_cpu, half))
            assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
            assert (found.actions is None) == (expected.actions is None)
            if expected.actions is not None:
                actions = np.abs((found.actions - expected.actions) / std).max()
                distances.append((actions, np.abs(found.paths - expected.paths).max()))
    assert len(distances) > SCENES / 2  # else it would say little
    actions, paths = np.max(distances, axis=0)
    record_property("actions", float(actions))
    print(f"largest difference of trajectories, {decode}: actions {actions:.1e} std, paths {paths:.1e} m")
    assert actions <= HALF_ACTIONS
    assert paths <= HALF_PATHS


def test_a_plan_takes_at_most_60_ms(pairs, on_gpu, record_property):
    """The time is from the camera's frame to the trajectory: all of `handle_request`.

    The requests come one after the other, when the runtime is warm.
    """
    driving = [
        scene for scene, (_, gpu) in zip(scenes(SCENES), pairs, strict=True) if gpu.actions is not None
    ]
    requests = [scene.request() for scene in driving[: PLANS + 3]]
    for one in requests[:3]:
        on_gpu.handle_request(one)
    seconds = []
    for one in requests[3:]:
        start = time.perf_counter()
        answer = on_gpu.handle_request(one)
        seconds.append(time.perf_counter() - start)
        assert answer.actions is not None
    assert len(seconds) == PLANS
    median = statistics.median(seconds)
    record_property("plan_seconds", float(median))
    print(f"plan: median {1e3 * median:.1f} ms, from {1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f} ms")
    assert median <= PLAN_SECONDS
