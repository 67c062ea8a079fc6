# SPDX-License-Identifier: Apache-2.0
"""A chunk of actions of a pi0 or pi0.5 with random weights, beside PyTorch.

Measures
--------
The time of `handle_request` (resizing of images included) and its stages, and for pi0.5 the time that PyTorch
takes from pixels to normalised actions of the same weights: eager, and compiled. `difference`: the largest
one between our normalised actions and PyTorch's eager ones, in shares of their range. Target on an H200:
`pi05` with two cameras and 10 Euler steps in bf16 at most 25 ms.

With --quantize or --cpu-int8 large layers are in 8 bits. With --in-turns the same engine in floats takes
turns with it; `change`: the largest difference between the actions of the first frames, in shares of their
range.

Conditions
----------
One request after another in this process, warm; another image in every request. Medians of --runs after
warm-up. Weights are random, since speed does not depend on them. The published pi0.5 has 3.4 billion:
7 GB in bf16 for the checkpoint, as much for the engine, on the disk and on the device. PyTorch needs
requirements-parity.txt; --no-pytorch leaves it out. It compiles for minutes, with --mode reduce-overhead for
fewer. After a change of the shape name another --directory, or none.

Examples
--------
    python -m benchmarks.policy --shape pi05 --precision bf16 --device cuda
    python -m benchmarks.policy --shape pi05-small --runs 5 --no-compile
    python -m benchmarks.policy --shape pi05-small --quantize int8 --in-turns --no-pytorch

Last JSON line: `seconds_per_chunk`, `processor_seconds` (of all threads) and `stages` (median, p90), `bytes`
of the weights that a session of this device reads, `floats` (the same of the other engine) and `change`,
`pytorch_eager_seconds` and `pytorch_compiled_seconds`, `difference`.

"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from benchmarks import common
from benchmarks.common import StopWatch
from benchmarks.model_shapes import add_shape
from benchmarks.pi_shapes import SIZES, PiSizes, parse_sizes, policy_config, processor_steps
from benchmarks.random_checkpoint import make_tokenizer, write_shards
from edgellm_ros.builder import export
from edgellm_ros.cli.arguments import DEVICES, integer
from edgellm_ros.diffusion.affine_space import model_state
from edgellm_ros.diffusion.heads.policy_heads import make_policy_head
from edgellm_ros.diffusion.policy_config import FlowPolicyConfig
from edgellm_ros.engine.device import open_device
from edgellm_ros.engine_directory.choices import PRECISIONS
from edgellm_ros.kernels.random import normal_noise
from edgellm_ros.multimodal.padded_image import padded_image
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.text.tokenizer import Tokenizer

HEIGHT, WIDTH = 480, 640
STATE = ACTIONS = 7
TASK, SEED, WARM_UP = "pick up the red cube and put it into the box", 3, 3
NORMALISATION = {"mean": 0.0, "std": 1.0, "q01": -1.0, "q99": 1.0}  # physical values are normalised ones


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    args = _parse(arguments)
    clock, device = StopWatch(), open_device(args.device)
    with tempfile.TemporaryDirectory() as temporary:
        root = args.directory or Path(temporary)
        checkpoint, engines = root / "checkpoint", _engines(root, args)
        _write_checkpoint(checkpoint, args.shape, args.cameras, args.precision)
        clock.done("checkpoint", f"{_parameters(args.shape) / 1e9:.3f} billion weights")
        for engine, options in engines.items():
            if not (engine / "config.json").is_file():
                export(checkpoint, engine, precision=args.precision, **options)
        clock.done("export")
        measured, policy = _measure_in_turns(list(engines), args)
        engine, (found, actions) = next(iter(measured.items()))
        for floats, before in list(measured.values())[1:]:
            found |= {"floats": floats, "change": _difference(actions, before)}
        clock.done("edgellm", f"{found['seconds_per_chunk']['median'] * 1e3:.1f} ms a chunk")
        if args.pytorch and args.shape.adaptive:
            found |= _measure_pytorch(args, checkpoint, _inputs(engine, policy, args), actions)
            clock.done("pytorch")
    return common.finish(
        "policy",
        shape=asdict(args.shape),
        parameters=_parameters(args.shape),
        precision=args.precision,
        device=args.device,
        **common.machine(device),
        cameras=args.cameras,
        steps=args.steps,
        runs=args.runs,
        quantize=args.quantize,
        cpu_int8=args.cpu_int8,
        **found,
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_shape(parser, parse_sizes, SIZES, "pi05")
    one = integer(1)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="(default: %(default)s)")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="(default: %(default)s)")
    parser.add_argument("--cameras", type=one, default=2, help="(default: %(default)s)")
    parser.add_argument("--steps", type=one, default=10, help="Euler steps (default: %(default)s)")
    parser.add_argument("--runs", type=one, default=30, help="(default: %(default)s)")
    parser.add_argument("--quantize", choices=["int8"], help="round the weights of large layers")
    parser.add_argument("--cpu-int8", action="store_true", help="multiply in 8 bits on a CPU")
    parser.add_argument("--in-turns", action="store_true", help="measure the same engine in floats too")
    parser.add_argument("--directory", type=Path, help="keep checkpoint and engine here (default: nowhere)")
    parser.add_argument("--no-pytorch", dest="pytorch", action="store_false", help="leave PyTorch out")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="PyTorch eager alone")
    parser.add_argument("--mode", default="max-autotune", help="of torch.compile (default: %(default)s)")
    args = parser.parse_args(arguments)
    if args.in_turns and not (args.quantize or args.cpu_int8):
        parser.error("--in-turns: the engine is in floats: add --quantize or --cpu-int8")
    return args


def _engines(root: Path, args: argparse.Namespace) -> dict[Path, dict[str, Any]]:
    """Return the options of the engines that are measured, by folder.

    The second one, if any, is in floats.
    """
    floats: Path = root / f"engine-{args.precision}"
    options = {"quantize": args.quantize, "cpu_int8": args.cpu_int8}
    names = [f"-{name}" for name, given in options.items() if given]
    if not names:
        return {floats: {}}
    engines = {floats.with_name(floats.name + "".join(names)): options}
    return engines | {floats: {}} if args.in_turns else engines


def _parameters(sizes: PiSizes) -> int:
    return sum(prod(shape) for shard in sizes.shards() for shape in shard.values())


def _write_checkpoint(folder: Path, sizes: PiSizes, cameras: int, precision: str) -> None:
    """Write a checkpoint unless the folder has one."""
    from safetensors.numpy import save_file

    if (folder / "config.json").is_file():
        return
    (folder / "vlm").mkdir(parents=True)
    make_tokenizer(sizes.vocab_size).save(str(folder / "vlm" / "tokenizer.json"), pretty=False)
    names = {f"camera_{i}": (HEIGHT, WIDTH) for i in range(cameras)}
    config = policy_config(sizes, names, STATE, ACTIONS)
    stats = {
        f"{key}.{name}": np.full(size, value, np.float32)
        for key, size in (("observation.state", STATE), ("action", ACTIONS))
        for name, value in NORMALISATION.items()
    }
    processors = ("policy_preprocessor", "policy_postprocessor")
    for name, steps in zip(processors, processor_steps(config), strict=True):
        entries = [{"registry_name": step, "config": settings} for step, settings in steps]
        for entry in entries:
            if "normalizer" in str(entry["registry_name"]):
                entry["state_file"] = f"{name}.safetensors"
                save_file(stats, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps({"name": name, "steps": entries}))
    write_shards(folder, sizes.shards(), precision, seed=0)
    (folder / "config.json").write_text(json.dumps(config))  # last: an interrupted checkpoint has none


def _frames(number: int, cameras: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(number)
    return tuple(rng.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8) for _ in range(cameras))


def _measure_in_turns(
    engines: list[Path], args: argparse.Namespace
) -> tuple[dict[Path, tuple[dict[str, Any], np.ndarray]], FlowPolicyConfig]:
    """Return the figures of each engine, and the policy.

    With the figures are the actions [T,A] of the first frames.
    """
    times = {engine: _Times() for engine in engines}
    with contextlib.ExitStack() as stack:
        runtimes = {
            engine: stack.enter_context(LLMInferenceRuntime(engine, args.device)) for engine in engines
        }
        for run in range(WARM_UP + args.runs):
            for engine, runtime in runtimes.items():
                times[engine].add(runtime, run, args)
        policy = runtimes[engines[0]].config.policy
    assert isinstance(policy, FlowPolicyConfig)
    form = "cuda" if args.device == "cuda" else "cpu"
    return {
        engine: (each.figures() | {"bytes": _weight_bytes(engine, form)}, each.actions)
        for engine, each in times.items()
    }, policy


class _Times:
    """Times of one engine's chunks, and its actions [T,A] of the first frames."""

    def __init__(self) -> None:
        self.actions = np.empty(0)
        self._seconds: list[float] = []
        self._processor: list[float] = []
        self._stages: dict[str, list[float]] = {}

    def add(self, runtime: LLMInferenceRuntime, run: int, args: argparse.Namespace) -> None:
        """Answer the request of a run; the first ones warm up."""
        request = LLMGenerationRequest(
            TASK,
            images=_frames(run, args.cameras),
            state=np.zeros(STATE),
            noise_seed=SEED,
            denoise_steps=args.steps,
        )
        start, processor = time.perf_counter(), time.process_time()
        response = runtime.handle_request(request)
        assert response.actions is not None
        if run == 0:
            self.actions = response.actions[0]
        if run >= WARM_UP:
            self._seconds.append(time.perf_counter() - start)
            self._processor.append(time.process_time() - processor)
            for name, value in response.metrics.items():
                if name.endswith("_s"):
                    self._stages.setdefault(name, []).append(value)

    def figures(self) -> dict[str, Any]:
        """Return medians and 90th percentiles."""
        return {
            "seconds_per_chunk": common.spread(self._seconds),
            "processor_seconds": common.spread(self._processor),
            "stages": {name: common.spread(values) for name, values in self._stages.items()},
        }


def _weight_bytes(engine: Path, form: str) -> int:
    """Sum the bytes of the weights that a device reads.

    form: "cuda" or "cpu", of graphs that are for this device alone.
    """
    graphs = (path.with_suffix(f".{form}.onnx") for path in engine.glob("*/model.onnx"))
    chosen = {each if each.is_file() else each.with_name("model.onnx") for each in graphs}
    chosen |= set(engine.glob(f"*/*.{form}.onnx"))  # those of this device alone too
    tensors = (value.const_value for path in chosen for value in ir.load(path).graph.initializers.values())
    return sum(each.nbytes for each in tensors if each is not None)


def _difference(actions: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actions - expected).max() / np.ptp(expected))


def _inputs(
    engine: Path, policy: FlowPolicyConfig, args: argparse.Namespace
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return pixels, tokens and noise of the first request."""
    cameras, space = policy.cameras, policy.action_space
    padding = cameras.image_size, cameras.fill, cameras.centred, cameras.filtered
    pixels = np.stack([padded_image(frame, *padding) for frame in _frames(0, args.cameras)])
    text = make_policy_head(policy).prompt(TASK, model_state(np.zeros(STATE), policy.state))
    words = Tokenizer(engine / "tokenizer.json").encode(text)
    tokens = np.array([*policy.prompt_before, *words, *policy.prompt_after], np.int64)
    noise = normal_noise(SEED, 1, space.horizon * space.model_dim).reshape(1, space.horizon, space.model_dim)
    return pixels, tokens, noise


def _measure_pytorch(
    args: argparse.Namespace, checkpoint: Path, arrays: tuple[np.ndarray, ...], actions: np.ndarray
) -> dict[str, Any]:
    """Time PyTorch, and compare its actions with ours."""
    import torch

    from benchmarks.torch_pi import TorchPi05

    device = "cpu" if args.device == "cpu" else "cuda"
    model = TorchPi05(checkpoint, args.shape, args.precision, device)
    inputs = [torch.tensor(array, device=device) for array in arrays]

    def timed(sample: Callable[..., Any]) -> tuple[dict[str, float], np.ndarray]:
        seconds = []
        for run in range(WARM_UP + args.runs):
            start = time.perf_counter()
            result = sample(*inputs).cpu().numpy()[0]  # waits for the device
            if run >= WARM_UP:
                seconds.append(time.perf_counter() - start)
        return common.spread(seconds), result

    eager, expected = timed(model.sampler(args.steps, None))
    expected = expected[:, : actions.shape[1]]
    found: dict[str, Any] = {"pytorch_eager_seconds": eager}
    found["difference"] = _difference(actions, expected)
    if args.compile:
        found["pytorch_compiled_seconds"], _ = timed(model.sampler(args.steps, args.mode))
    return found


if __name__ == "__main__":
    main()
