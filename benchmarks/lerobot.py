# SPDX-License-Identifier: Apache-2.0
"""A chunk of actions of an ACT or a Diffusion Policy, beside LeRobot's code.

Measures
--------
Seconds from camera frames and state on the host to physical actions on the host: `handle_request` of
LLMInferenceRuntime, and LeRobot's code as its users run it: frames to tensors, its processors, the policy,
its processors. `eager`, and `compiled` with torch.compile. `difference`: the largest one between our actions
and LeRobot's, in shares of their range, of the same frames, state and noise.

Conditions
----------
All take turns in this process, chunk by chunk, on the same frames, which are new for each chunk. Medians and
90th percentiles of --runs chunks after 5 to warm up. Random weights of LeRobot's default sizes: an ACT with
resnet18, width 512, 100 actions, and two cameras of 480x640 pixels; a Diffusion Policy with 263 million
weights in its U-Net, a camera of 96x96 pixels cut to 84x84, two observations, and 10 steps of DDIM. --small:
small layers. In half precision LeRobot runs under autocast, its weights in fp32; in fp32 PyTorch computes
convolutions in TF32 on a GPU, by its defaults, and we do not. Of a Diffusion Policy, the frame of the earlier
observation is in LeRobot's queue when the time begins, while a request has both.

LeRobot 0.4.4 must be on Python's path, with or without its dependencies (requirements-lerobot.txt).

Examples
--------
    PYTHONPATH=.venv/lerobot python -m benchmarks.lerobot --policy act --device cuda --precision fp16
    PYTHONPATH=.venv/lerobot python -m benchmarks.lerobot --policy diffusion --device cuda
    PYTHONPATH=.venv/lerobot python -m benchmarks.lerobot --policy act --small --runs 5 --no-compile

Last JSON line: the options, `parameters`, `edgellm`, `eager` and `compiled` in seconds, `stages` of ours,
and `difference`.

"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.common import StopWatch
from benchmarks.empty_modules import EmptyModules, add_policies_of_lerobot
from edgellm_ros.builder import export
from edgellm_ros.cli.arguments import integer
from edgellm_ros.engine.device import open_device
from edgellm_ros.engine_directory.choices import PRECISIONS
from edgellm_ros.kernels.random import normal_noise
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest

WARM_UP = 5
ACT, DIFFUSION = "act", "diffusion"
JOINTS = 6  # values of state and actions
CAMERAS = {ACT: (2, 480, 640), DIFFUSION: (1, 96, 96)}  # number, height and width
SMALL = {
    ACT: {"dim_model": 64, "n_heads": 4, "dim_feedforward": 128, "n_encoder_layers": 2, "chunk_size": 20,
          "n_action_steps": 20},
    DIFFUSION: {"down_dims": (32, 64, 128)},
}  # fmt: skip
FIXED: dict[str, dict[str, Any]] = {
    ACT: {},
    DIFFUSION: {"crop_shape": (84, 84), "noise_scheduler_type": "DDIM"},
}
TYPES = {"fp16": "float16", "bf16": "bfloat16"}
Chunk = Callable[[int], tuple[float, np.ndarray]]  # of a number: its seconds and actions


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    args = _parse(arguments)
    clock, device = StopWatch(), open_device(args.device)
    with tempfile.TemporaryDirectory(dir=args.directory) as root:
        checkpoint, engine = Path(root) / "checkpoint", Path(root) / "engine"
        reference = LeRobot(args)
        reference.save(checkpoint)
        export(checkpoint, engine, precision=args.precision)
        clock.done("checkpoint and export", f"{reference.parameters / 1e6:.1f} million weights")
        chunks: dict[str, Chunk] = {"eager": reference.chunk}
        if args.compile:
            chunks["compiled"] = reference.compiled(args.mode).chunk
        with LLMInferenceRuntime(engine, args.device) as runtime:
            found = _measure(runtime, chunks, args)
        clock.done("chunks")
    return common.finish(
        "lerobot",
        policy=args.policy,
        small=args.small,
        cameras=args.cameras,
        steps=args.steps if args.policy == DIFFUSION else None,
        precision=args.precision,
        device=args.device,
        **common.machine(device),
        runs=args.runs,
        parameters=reference.parameters,
        **found,
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, one = parser.add_argument, integer(1)
    add("--policy", default=ACT, choices=(ACT, DIFFUSION), help="(default: %(default)s)")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="(default: %(default)s)")
    add("--precision", default="fp32", choices=PRECISIONS, help="(default: %(default)s)")
    add("--cameras", type=one, help="number of cameras (default: 2 of an ACT, 1 of a Diffusion Policy)")
    add("--steps", type=one, default=10, help="of a Diffusion Policy (default: %(default)s)")
    add("--runs", type=one, default=50, help="chunks to measure (default: %(default)s)")
    add("--small", action="store_true", help="small layers")
    add("--no-compile", dest="compile", action="store_false", help="LeRobot eager alone")
    add("--mode", default="reduce-overhead", help="of torch.compile (default: %(default)s)")
    add("--directory", type=Path, help="where to write checkpoint and engine (default: a temporary folder)")
    args = parser.parse_args(arguments)
    args.cameras = args.cameras or CAMERAS[args.policy][0]
    return args


def _frames(number: int, args: argparse.Namespace) -> np.ndarray:
    """Make the frames [cameras,H,W,3] uint8 of a time."""
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, (args.cameras, *CAMERAS[args.policy][1:], 3), dtype=np.uint8)


def _state(number: int) -> np.ndarray:
    return np.random.default_rng(number).uniform(-1, 1, JOINTS).astype(np.float32)


def _request(number: int, args: argparse.Namespace) -> LLMGenerationRequest:
    """Make the request of a chunk, with observations of its time and before it."""
    frames, state = _frames(number, args), _state(number)
    if args.policy == ACT:
        return LLMGenerationRequest(images=tuple(frames), state=state)
    both = np.stack([_frames(number - 1, args), frames], axis=1)  # [cameras,2,H,W,3]
    states = np.stack([_state(number - 1), state])
    return LLMGenerationRequest(images=tuple(both), state=states, noise_seed=number)


def _measure(
    runtime: LLMInferenceRuntime, chunks: dict[str, Chunk], args: argparse.Namespace
) -> dict[str, Any]:
    """Measure chunks in turns; return their seconds and the difference of actions."""
    seconds: dict[str, list[float]] = {name: [] for name in ("edgellm", *chunks)}
    stages: dict[str, list[float]] = {}
    difference = 0.0
    for number in range(1, 1 + WARM_UP + args.runs):
        request = _request(number, args)
        start = time.perf_counter()
        response = runtime.handle_request(request)
        times = {"edgellm": time.perf_counter() - start}
        results = {}
        for name, chunk in chunks.items():
            times[name], results[name] = chunk(number)
        assert response.actions is not None
        expected = results["eager"]
        error = np.abs(response.actions[0] - expected).max() / np.ptp(expected)
        difference = max(difference, float(error))
        if number <= WARM_UP:
            continue
        for name, value in times.items():
            seconds[name].append(value)
        for name, value in response.metrics.items():
            if name.endswith("_s"):
                stages.setdefault(name, []).append(value)
    found: dict[str, Any] = {name: common.spread(values) for name, values in seconds.items()}
    found["stages"] = {name: common.spread(values) for name, values in stages.items()}
    return found | {"difference": difference}


class LeRobot:
    """LeRobot's policy and processors, with random weights."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        if not any(isinstance(finder, EmptyModules) for finder in sys.meta_path):
            sys.meta_path.insert(0, EmptyModules())
            add_policies_of_lerobot()
        from lerobot.configs.types import FeatureType, PolicyFeature

        self._torch, self._args = torch, args
        torch.manual_seed(0)
        count, height, width = args.cameras, *CAMERAS[args.policy][1:]
        self._names = [f"observation.images.camera_{i}" for i in range(count)]
        inputs = {name: PolicyFeature(FeatureType.VISUAL, (3, height, width)) for name in self._names}
        inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (JOINTS,))
        settings = {
            **FIXED[args.policy],
            **(SMALL[args.policy] if args.small else {}),
            **({"num_inference_steps": args.steps} if args.policy == DIFFUSION else {}),
            "input_features": inputs,
            "output_features": {"action": PolicyFeature(FeatureType.ACTION, (JOINTS,))},
            "pretrained_backbone_weights": None,
            "device": args.device,
        }
        if args.policy == ACT:
            from lerobot.policies.act.configuration_act import ACTConfig
            from lerobot.policies.act.modeling_act import ACTPolicy
            from lerobot.policies.act.processor_act import make_act_pre_post_processors as processors

            config, policy = ACTConfig(**settings), ACTPolicy
        else:
            from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
            from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
            from lerobot.policies.diffusion.processor_diffusion import (
                make_diffusion_pre_post_processors as processors,
            )

            config, policy = DiffusionConfig(**settings), DiffusionPolicy
        self._policy = policy(config).eval().to(args.device)
        self._before, self._after = processors(config, _statistics(torch, self._names))
        self.parameters = sum(each.numel() for each in self._policy.parameters())

    def save(self, folder: Path) -> None:
        """Save policy and processors, as LeRobot does."""
        for part in (self._policy, self._before, self._after):
            part.save_pretrained(folder)

    def compiled(self, mode: str) -> LeRobot:
        """Return the same with compiled modules, which compile in their first run."""
        other = copy.copy(self)
        other._policy = copy.deepcopy(self._policy)
        if self._args.policy == ACT:
            other._policy.model.compile(mode=mode)
        else:
            other._policy.diffusion.unet.compile(mode=mode)
            other._policy.diffusion.rgb_encoder.compile(mode=mode)
        return other

    def chunk(self, number: int) -> tuple[float, np.ndarray]:
        """Return the seconds of a chunk, and its physical actions [T,A]."""
        torch, args, policy = self._torch, self._args, self._policy
        half = args.precision in TYPES
        dtype = getattr(torch, TYPES[args.precision]) if half else None
        observation = self._observation(number)
        with torch.inference_mode(), torch.autocast(args.device, dtype) if half else nullcontext():
            if args.policy == ACT:
                self._synchronize()
                start = time.perf_counter()
                actions = policy.predict_action_chunk(self._batch(observation))
            else:
                policy.reset()
                self._enqueue(self._batch(self._observation(number - 1)))
                noise = normal_noise(number, 1, policy.config.horizon * JOINTS).reshape(1, -1, JOINTS)
                noise = torch.tensor(noise, device=args.device)
                self._synchronize()
                start = time.perf_counter()
                actions = policy.predict_action_chunk(self._enqueue(self._batch(observation)), noise=noise)
            result = self._after(actions)[0].float().cpu().numpy()  # waits for the device
            return time.perf_counter() - start, result

    def _enqueue(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add an observation to the queues of a Diffusion Policy, as `select_action` does."""
        from lerobot.policies.utils import populate_queues

        policy = self._policy
        batch = {name: batch[name] for name in (*self._names, "observation.state")}
        batch["observation.images"] = self._torch.stack([batch[name] for name in self._names], dim=-4)
        policy._queues = populate_queues(policy._queues, batch)
        return batch

    def _observation(self, number: int) -> dict[str, np.ndarray]:
        frames = dict(zip(self._names, _frames(number, self._args), strict=True))
        return frames | {"observation.state": _state(number)}

    def _batch(self, observation: dict[str, np.ndarray]) -> dict[str, Any]:
        """Make the policy's inputs of what is on the host, as LeRobot does on a robot."""
        from lerobot.policies.utils import prepare_observation_for_inference

        device = self._torch.device(self._args.device)
        return self._before(prepare_observation_for_inference(observation, device))

    def _synchronize(self) -> None:
        if self._args.device == "cuda":
            self._torch.cuda.synchronize()


def _statistics(torch: Any, cameras: list[str]) -> dict[str, dict[str, Any]]:
    """Make statistics of LeRobot's data sets that change no value much."""
    values = {"mean": 0.1, "std": 1.0, "min": -1.0, "max": 1.0}
    shapes = {"action": (JOINTS,), "observation.state": (JOINTS,), **dict.fromkeys(cameras, (3, 1, 1))}
    return {
        name: {key: torch.full(shape, value) for key, value in values.items()}
        for name, shape in shapes.items()
    }


if __name__ == "__main__":
    main()
