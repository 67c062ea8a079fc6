# SPDX-License-Identifier: Apache-2.0
"""Decode time per token on the paths that users take: `benchmarks.decode --paths`.

The benchmark's own loop, LLMInferenceRuntime as in examples/in_process.py, `edgellm generate` in a process of
its own, and the same without CUDA graphs answer the same request, one at a time. Each path is fresh: its
first answer is told apart, and the median is that of the answers after the first two.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import cv2

from benchmarks.decode_runs import make_requests, prompt_ids
from edgellm_ros.builder import export
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.cli.bench import synthetic_frame
from edgellm_ros.engine.device import Device
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams

LOOP, IN_PROCESS, GENERATE, NO_GRAPHS = (
    "the benchmark's loop",
    "LLMInferenceRuntime, as in examples/in_process.py",
    "edgellm generate",
    "LLMInferenceRuntime, cuda_graphs=False",
)
PROMPT = "go to the red box"  # of a checkpoint that sees, with a synthetic frame as in `edgellm bench`
WARM_UP = 2  # answers of each path that are left out of its median
LOOP_OPTIONS = {"prefix_cache_bytes": 0}  # of the benchmark's loop; the other paths have the defaults


@dataclass(frozen=True)
class PathRequest:
    """A request, as the runtime takes it and as a file for `edgellm generate` has it."""

    request: LLMGenerationRequest
    entry: dict[str, Any]


def random_request(context: int, tokens: int) -> PathRequest:
    """Make a request of `context` letters, with an answer of `tokens` tokens."""
    (request,) = make_requests(1, context, tokens)
    return PathRequest(request, {"prompt": request.prompt, **_sampling(tokens)})


def scene_request(folder: Path, tokens: int) -> PathRequest:
    """Make the request of a checkpoint: a synthetic camera frame and a command.

    The answer ends where the model stops, at the latest after `tokens` tokens; without a trajectory.
    """
    frame, file = synthetic_frame(), folder / "frame.png"
    cv2.imwrite(str(file), frame[..., ::-1])
    entry = {"prompt": PROMPT, "images": [file.name], "action_samples": 0, **_sampling(tokens)}
    sampling = SamplingParams(**_sampling(tokens))
    request = LLMGenerationRequest(PROMPT, images=(frame,), sampling=sampling, action_samples=0)
    return PathRequest(request, entry)


def _sampling(tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": tokens}


def export_for_paths(
    checkpoint: Path, engine: Path, precision: str, request: PathRequest, has_shape: bool
) -> dict[str, Any]:
    """Export a checkpoint for one request at a time.

    Return the options that are not the defaults.
    """
    options: dict[str, Any] = {"max_batch_size": 1}  # `edgellm generate --requests` fills batches
    if has_shape:  # a KV cache of the request's size
        config = plan_export(checkpoint, ExportOptions(precision=precision)).config
        prompt = len(prompt_ids(checkpoint, config, request.request))
        options["max_input_len"] = prompt
        options["max_kv_cache_capacity"] = prompt + request.request.sampling.max_tokens
    export(checkpoint, engine, precision=precision, **options)
    return options


def measure_paths(
    engine: Path, device: Device, request: PathRequest, answers: int, folder: Path
) -> dict[str, Any]:
    """Measure each path; return ms per token, and ratios to the benchmark's loop.

    - device: on which the benchmark's loop runs; the other paths open it by its name
    - answers: that the median of each path is of
    """
    answers += WARM_UP
    found = {
        LOOP: _in_process(engine, device, request, answers, **LOOP_OPTIONS),
        IN_PROCESS: _in_process(engine, device.name, request, answers),
        GENERATE: _generate(engine, device.name, request, answers, folder),
    }
    if device.has_graphs:
        found[NO_GRAPHS] = _in_process(engine, device.name, request, answers, cuda_graphs=False)
    reference = found[LOOP]
    tokens = reference.token_ids[0]
    same = all(ids == tokens for each in found.values() for ids in each.token_ids)
    loop_ms = reference.figures()["token_ms"]
    paths = {
        name: {**(figures := each.figures()), "times_loop": figures["token_ms"] / loop_ms}
        for name, each in found.items()
    }
    print(table(paths), file=sys.stderr)
    worst = max(abs(paths[name]["times_loop"] - 1) for name in (IN_PROCESS, GENERATE))
    return {
        "tokens": len(tokens),
        "same_tokens": same,
        "answers": answers,
        "paths": paths,
        "largest_difference": worst,
    }


def table(paths: dict[str, dict[str, float]]) -> str:
    """Format the figures of the paths."""
    lines = [f"{'decode, ms per token':<52}{'median':>10}{'first':>10}{'of the loop':>13}"]
    lines += [
        f"{name:<52}{each['token_ms']:>10.4f}{each['first_ms']:>10.4f}{each['times_loop']:>13.3f}"
        for name, each in paths.items()
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class _Answers:
    token_ids: list[list[int]]
    decode_s: list[float]

    def figures(self) -> dict[str, float]:
        """Return ms per token: the first answer's, and the median after the warm-up."""
        times = [  # the first token is from the prefill
            1e3 * seconds / (len(ids) - 1) for ids, seconds in zip(self.token_ids, self.decode_s, strict=True)
        ]
        return {"token_ms": median(times[WARM_UP:]), "first_ms": times[0]}


def _in_process(
    engine: Path, device: str | Device, request: PathRequest, answers: int, **options: Any
) -> _Answers:
    gc.collect()
    with LLMInferenceRuntime(engine, device, **options) as runtime:
        responses = [runtime.handle_request(request.request) for _ in range(answers)]
    return _Answers([one.token_ids for one in responses], [one.metrics["decode_s"] for one in responses])


def _generate(engine: Path, device: str, request: PathRequest, answers: int, folder: Path) -> _Answers:
    """Answer with `edgellm generate`; the times are its own metrics."""
    requests, out = folder / "requests.json", folder / "answers.json"
    requests.write_text(json.dumps([request.entry] * answers))
    command = [sys.executable, "-m", "edgellm_ros", "generate", engine, "--requests", requests, "--out", out]
    subprocess.run([*map(str, command), "--device", device], check=True)
    found = json.loads(out.read_text())
    failed = [one["error"] for one in found if "error" in one]
    if failed:
        raise RuntimeError(f"edgellm generate: {failed[0]}")
    return _Answers([one["token_ids"] for one in found], [one["metrics"]["decode_s"] for one in found])
