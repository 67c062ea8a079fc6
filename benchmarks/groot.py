# SPDX-License-Identifier: Apache-2.0
"""Time of a chunk of GR00T, beside LeRobot's code on PyTorch.

Measures
--------
Seconds of one chunk with random weights: `handle_request` of LLMInferenceRuntime, from camera frames on the
host to physical actions on the host, and its stages: vision (crop, resize, tower), prefill (language model
and layers of self-attention), action (the DiT, all Euler steps). Target on an H200: 40 ms with two cameras in
bf16.

With --pytorch, for N1.7 alone, the same for `GR00TN17.get_action` of LeRobot 0.6 (Python 3.12), in the same
precision on the same weights, compiled by torch.compile unless --eager: from patches and tokens on the device
to normalised actions on the device, so without images, tokens and statistics. LeRobot must be on Python's
path, with or without what its extra `groot` installs.

Median and 90th percentile of --runs chunks after 5 to warm up. Both take turns.

Conditions
----------
Sizes are the published ones of --version, or with --layers N of each kind of layers that many. Frames have
480x640 pixels and become 64 rows each, with N1.6 81; a task has some 10 tokens. Each chunk has other frames,
states and noise. One request after the other, one sample, the checkpoint's 4 Euler steps. The checkpoint
needs 6.3 GB on the disk, the engine as much.

Examples
--------
    python -m benchmarks.groot --device cuda --precision bf16 --pytorch
    python -m benchmarks.groot --version n1.6 --layers 2 --precision fp32 --runs 3

Last JSON line: the options, `parameters`, and `chunk`, `vision`, `prefill`, `action` and `pytorch` in
seconds.

"""

from __future__ import annotations

import argparse
import tempfile
import time
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.common import StopWatch
from benchmarks.empty_modules import import_groot
from benchmarks.groot_n16_shapes import N1_6
from benchmarks.groot_shapes import N1_7, SPECIAL, write_groot_checkpoint
from edgellm_ros.builder import export
from edgellm_ros.cli.arguments import integer
from edgellm_ros.engine.device import open_device
from edgellm_ros.engine_directory.choices import PRECISIONS
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest

VERSIONS = {"n1.6": N1_6, "n1.7": N1_7}
LEROBOT = "lerobot.policies.groot.groot_n1_7"
WARM_UP = 5
TASK = "put the red cube into the box"
TOKENS = 20  # of a prompt besides images
PATCHES, PATCH_VALUES, ROWS = 256, 1536, 64  # of an image
TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
STAGES = {"vision": "vision_s", "prefill": "prefill_s", "action": "action_s"}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    args = parse(arguments)
    version = VERSIONS[args.version]
    model, vlm = version.small(args.layers) if args.layers else (version.model, version.vlm)
    parameters = sum(map(prod, version.shapes(model, vlm).values()))
    clock, device = StopWatch(), open_device(args.device)
    with tempfile.TemporaryDirectory() as temporary:
        root = args.directory or Path(temporary)
        checkpoint, engine = root / "checkpoint", root / f"engine-{args.precision}"
        if not (checkpoint / "config.json").is_file():
            write_groot_checkpoint(checkpoint, version, model, vlm, args.cameras)
        clock.done("checkpoint", f"{parameters / 1e9:.3f} billion weights")
        if not (engine / "config.json").is_file():
            export(checkpoint, engine, precision=args.precision)
        clock.done("export")
        reference = PyTorch(checkpoint, args) if args.pytorch else None
        with LLMInferenceRuntime(engine, args.device) as runtime:
            clock.done("load")
            found = measure(runtime, reference, args)
    spreads = {name: common.spread(seconds) for name, seconds in found.items()}
    return common.finish(
        "groot",
        version=args.version,
        cameras=args.cameras,
        precision=args.precision,
        layers=args.layers,
        device=args.device,
        **common.machine(device),
        parameters=parameters,
        compiled=args.pytorch and not args.eager,
        **spreads,
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cpu", choices=("cpu", "cuda"), help="where to run (default: %(default)s)")
    add("--precision", default="bf16", choices=PRECISIONS, help="of the engine (default: %(default)s)")
    add("--version", default="n1.7", choices=VERSIONS, help="of GR00T (default: %(default)s)")
    add("--cameras", type=integer(1), default=2, help="number of cameras (default: %(default)s)")
    add("--layers", type=integer(2), help="layers of each kind (default: the published numbers)")
    add("--runs", type=integer(1), default=50, help="chunks to measure (default: %(default)s)")
    add("--pytorch", action="store_true", help="measure LeRobot's code too")
    add("--eager", action="store_true", help="do not compile it")
    add("--lerobot", default=LEROBOT, help="its module (default: %(default)s)")
    add("--directory", type=Path, help="keep checkpoint and engine here (default: nowhere)")
    args = parser.parse_args(arguments)
    if args.pytorch and args.version != "n1.7":
        parser.error(f"--pytorch: LeRobot has GR00T N1.7 alone, not {args.version}")
    return args


def measure(
    runtime: LLMInferenceRuntime, reference: PyTorch | None, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Measure chunks; return their seconds by stage."""
    rng, found = np.random.default_rng(0), {name: [] for name in ("chunk", *STAGES)}
    found |= {"pytorch": []} if reference is not None else {}
    for number in range(WARM_UP + args.runs):
        frames = rng.integers(0, 256, (args.cameras, 480, 640, 3), dtype=np.uint8)
        state = rng.uniform(-1, 1, 8).astype(np.float32)
        request = LLMGenerationRequest(TASK, images=tuple(frames), state=state, noise_seed=number)
        start = time.perf_counter()
        response = runtime.handle_request(request)
        seconds = {"chunk": time.perf_counter() - start}
        seconds |= {name: response.metrics[key] for name, key in STAGES.items()}
        if reference is not None:
            seconds["pytorch"] = reference.chunk()
        for name, value in seconds.items() if number >= WARM_UP else ():
            found[name].append(value)
    return found


class PyTorch:
    """GR00T of LeRobot on PyTorch, with random inputs."""

    def __init__(self, checkpoint: Path, args: argparse.Namespace) -> None:
        import torch

        self._torch, self._cuda = torch, args.device == "cuda"
        module, dtype = import_groot(args.lerobot), getattr(torch, TYPES[args.precision])
        config = module.GR00TN17Config.from_pretrained(checkpoint, dtype=dtype)
        if args.layers:  # else the sizes of the backbone are LeRobot's own
            config.model_name = str(checkpoint / "vlm")
        model = module.GR00TN17.from_pretrained(checkpoint, config=config, dtype=dtype)
        self._model = model.to(args.device, dtype).eval()
        if not args.eager:
            self._model.backbone.model.compile()
            self._model.action_head.model.compile()
        start, image, end = (SPECIAL[f"<|{name}|>"] for name in ("vision_start", "image_pad", "vision_end"))
        ids = [*([start, *[image] * ROWS, end] * args.cameras), *range(TOKENS)]
        count, device = args.cameras, args.device
        self._inputs = {
            "input_ids": torch.tensor([ids], device=device),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.int64, device=device),
            "pixel_values": torch.randn(count * PATCHES, PATCH_VALUES, device=device, dtype=dtype),
            "image_grid_thw": torch.tensor([[1, 16, 16]] * count, device=device),
            "state": torch.zeros(1, 1, config.max_state_dim, device=device, dtype=dtype),
            "embodiment_id": torch.tensor([10], device=device),
        }

    def chunk(self) -> float:
        """Compute a chunk and return its seconds."""
        start = self._now()
        with self._torch.no_grad():
            self._model.get_action(dict(self._inputs))
        return self._now() - start

    def _now(self) -> float:
        if self._cuda:
            self._torch.cuda.synchronize()
        return time.perf_counter()


if __name__ == "__main__":
    main()
