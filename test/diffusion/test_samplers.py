# SPDX-License-Identifier: Apache-2.0
"""Steps of samplers, against the formulas of DDPM, DDIM and X-VLA in float64."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.diffusion.diffusion_policy_config import NoiseScheduleConfig
from edgellm_ros.diffusion.samplers import NOISE_AT_1, NoiseSchedule, Sampler, StartNoise, StepTensors
from edgellm_ros.engine.device import on_device, open_device
from edgellm_ros.kernels import load_kernels

SHAPE = (2, 4, 3)
TRAINED = 50


def schedule(sampler: str, **changes) -> NoiseSchedule:
    values = {
        "sampler": sampler, "train_steps": TRAINED, "beta_schedule": "squaredcos_cap_v2", "beta_start": 1e-4,
        "beta_end": 0.02, "prediction": "epsilon", "clip": None,
    }  # fmt: skip
    return NoiseSchedule(NoiseScheduleConfig(**values | changes))


def betas(kind: str) -> np.ndarray:
    """The variances of the training's steps, by the papers of the schedules."""
    if kind == "linear":
        return np.linspace(1e-4, 0.02, TRAINED)
    if kind == "scaled_linear":
        return np.linspace(1e-4**0.5, 0.02**0.5, TRAINED) ** 2
    kept = np.cos((np.arange(TRAINED + 1) / TRAINED + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.minimum(1 - kept[1:] / kept[:-1], 0.999)


def steps_of(sampled: Sampler, outputs, noises, start: np.ndarray) -> list[np.ndarray]:
    """Run the steps with given outputs of the model; return x after each."""
    device, steps = open_device("cpu"), len(outputs)
    kernels, x = load_kernels(device), on_device(device, start.copy())
    time, found = on_device(device, np.full(1, sampled.time(0, steps), np.float32)), []
    for number in range(steps):
        assert device.download(time)[0] == np.float32(sampled.time(number, steps))
        noise = on_device(device, noises[number]) if number < sampled.noises(steps) else None
        tensors = StepTensors(x, on_device(device, outputs[number]), time, noise)
        sampled.queue(kernels, tensors, number, steps)
        found.append(device.download(x))
    return found


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_steps_of_an_x_vla_mix_predictions_with_the_noise_of_the_start(steps):
    rng, sampled = np.random.default_rng(steps), StartNoise()
    start = rng.standard_normal(SHAPE).astype(np.float32)
    outputs = rng.standard_normal((steps, *SHAPE)).astype(np.float32)
    found = steps_of(sampled, outputs, [start] * steps, start)
    assert sampled.adds_start
    for number, output in enumerate(outputs):
        time = (steps - number - 1) / steps
        np.testing.assert_allclose(found[number], start * time + output * (1 - time), atol=1e-6)
    np.testing.assert_array_equal(found[-1], outputs[-1])


@pytest.mark.parametrize("steps", [1, 7, 10, TRAINED])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("prediction", ["epsilon", "sample"])
@pytest.mark.parametrize("kind", ["squaredcos_cap_v2", "linear", "scaled_linear"])
@pytest.mark.parametrize("sampler", ["DDPM", "DDIM"])
def test_steps_follow_the_formulas(sampler, kind, prediction, clip, steps):
    rng = np.random.default_rng(steps)
    x = rng.standard_normal(SHAPE).astype(np.float32)
    outputs, noises = rng.standard_normal((2, steps, *SHAPE)).astype(np.float32)
    sampled = schedule(sampler, beta_schedule=kind, prediction=prediction, clip=clip)
    found = steps_of(sampled, outputs, noises, x)
    kept_by_time = np.cumprod(1 - betas(kind))
    times = [TRAINED // steps * k for k in reversed(range(steps))]
    x = x.astype(np.float64)
    for number, time in enumerate(times):
        last = number == steps - 1
        kept, kept_next = kept_by_time[time], 1.0 if last else kept_by_time[times[number + 1]]
        if prediction == "epsilon":
            noise, clean = outputs[number], (x - np.sqrt(1 - kept) * outputs[number]) / np.sqrt(kept)
        else:
            noise, clean = (x - np.sqrt(kept) * outputs[number]) / np.sqrt(1 - kept), outputs[number]
        clean = clean if clip is None else clean.clip(-clip, clip)
        if sampler == "DDIM":
            x = np.sqrt(kept_next) * clean + np.sqrt(1 - kept_next) * noise
        else:
            beta = 1 - kept / kept_next
            mean = np.sqrt(kept_next) * beta * clean + np.sqrt(kept / kept_next) * (1 - kept_next) * x
            x = mean / (1 - kept)
            if not last:
                x = x + np.sqrt((1 - kept_next) / (1 - kept) * beta) * noises[number]
        np.testing.assert_allclose(found[number], x, atol=1e-3 * max(1, np.abs(x).max()))


def test_the_last_step_of_ddpm_and_all_of_ddim_and_of_a_flow_add_no_noise():
    assert [schedule("DDPM").noises(steps) for steps in (1, 7)] == [0, 6]
    assert schedule("DDIM").noises(7) == NOISE_AT_1.noises(7) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": "PNDM"}, "sampler must be of DDPM, DDIM, got 'PNDM'"),
        ({"beta_schedule": "sigmoid"}, "beta_schedule must be of squaredcos_cap_v2, .* got 'sigmoid'"),
        ({"prediction": "v"}, "prediction must be of epsilon, sample, got 'v'"),
        ({"train_steps": 0}, "train_steps must be from 1 to 100000, got 0"),
        ({"beta_end": 1.0}, "beta_start and beta_end must rise between 0 and 1, got 0.0001 and 1.0"),
        ({"clip": 0.0}, "clip must be more than 0, got 0.0"),
    ],
)
def test_an_impossible_schedule_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        schedule(**{"sampler": "DDPM"} | changes)
