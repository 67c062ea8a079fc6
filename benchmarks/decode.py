# SPDX-License-Identifier: Apache-2.0
"""Speed of a model of any size, beside transformers and memory bandwidth.

Prompts are with or without a camera frame.

Measures
--------
- vision (with --frame): from the image to rows of embeddings, resizing on the host included.
- prefill: the prompt and its first token. first_token: from the request to that token on the host. decode:
  the runtime's own time of the decode stage per step; median and p90 of --runs runs after 2 warm-up runs.
  `wall_ms`: the same measured around the call, less the time to the first token. `step_ms`: from the tokens
  of one step to those of the next, in one more run.
- host time: from the end of the wait for the tokens of a step to the begin of the next wait, which is the
  host's own work per step: tokens to text, and queueing a step (`queue_us_per_step`: the launch of its
  graph, the copy of its tokens, an event). The device has a step to run meanwhile. Median over the steps of
  that run. null on the CPU, where the host does all the work.
- bytes per step: all weights of the language model once (with the last matrix; without the embedding table
  unless it is that matrix), the average KV rows of every sequence, and its recurrent state twice. Share of
  the copy bandwidth: these bytes per second of the median step, divided by bytes read and written per second
  by copies of 256 MiB on the same device in the same run.
- memory: in use on the device after all runs, and the peak while loading and warming up, both less the memory
  in use when only the device was open. `overhead`: the excess over weights (a table that is used twice counts
  once), KV cache and recurrent states (before and after a run). On the CPU this is resident memory, which
  includes memory that malloc keeps.
- with --paths, in place of all that: decode time per token of the same request through this benchmark's loop,
  through LLMInferenceRuntime as in examples/in_process.py, through `edgellm generate`, and without CUDA
  graphs (benchmarks/decode_paths.py). `largest_difference`: of the two paths from the loop, 0.05 = 5%.
- with --quantize: weights are those of the exported engine, and transformers is not run.
- transformers: the same weights, prompts and precision on the same device in the same process, after our
  runtime is closed: eager with a growing cache, and compiled with a static cache (decode steps with
  `reduce-overhead`: CUDA graphs on a GPU). `pixels_ms` is its image processor, `vision_ms` the tower.
  `same_tokens`: number of equal greedy tokens before the first difference, the minimum of the batch. In fp16
  and bf16 answers diverge where two logits are almost equal, which is soon with random weights.

Conditions
----------
Weights are random, written as a real checkpoint, and exported by the real exporter. Checkpoints with a vision
tower or recurrent layers are made by transformers, and so need it. Decoding is
`handle_request` with a prompt of --context tokens, greedy, --tokens tokens per sequence, no prefix reuse, a
KV cache of exactly this size. No answer ends early,
because the stop token's logit is never the largest.

Examples
--------
    python -m benchmarks.decode
    python -m benchmarks.decode --shape qwen3-1.7b --device cuda --batch 1,8
    python -m benchmarks.decode --shape qwen3-1.7b --device cuda --quantize int4
    python -m benchmarks.decode --shape llama-3.2-1b,num_hidden_layers=2 --no-transformers
    python -m benchmarks.decode --shape qwen3-1.7b --device cuda --paths
    python -m benchmarks.decode --checkpoint models/arena --device cuda --paths
    python -m benchmarks.decode --shape qwen3-vl-2b --frame 640x480 --context 64 --device cuda

Standard error has the duration of each phase. Last JSON line: the options, `batches` (the figures of each
batch size), `memory_bytes`, `memory_overhead`, `kernels` (with --profile), `transformers`, and `seconds` by
phase. docs/performance.md has results of an H200.

"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import StopWatch, changed, finish, machine, numbers
from benchmarks.decode_paths import (
    LOOP_OPTIONS,
    export_for_paths,
    measure_paths,
    random_request,
    scene_request,
)
from benchmarks.decode_runs import (
    bytes_per_step,
    decode,
    make_requests,
    measure,
    profile_steps,
    prompt_ids,
)
from benchmarks.device_memory import PeakMemory, used_bytes
from benchmarks.kernel_profile import KernelProfile, format_table
from benchmarks.model_shapes import BYTES_PER_VALUE, SHAPES, add_shape
from benchmarks.published_models import MODELS, parse_any
from benchmarks.random_checkpoint import write_checkpoint
from edgellm_ros.builder import export
from edgellm_ros.builder.calibration.rounding import GROUP_SIZES, TYPES
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.builder.report.inspection import inspect
from edgellm_ros.cli.arguments import DEVICES, integer
from edgellm_ros.cli.copy_bandwidth import copy_bandwidth
from edgellm_ros.engine.device import Device, open_device
from edgellm_ros.fused.loading.availability import AUTO, DECODES
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest

WARM_UP_RUNS = 2


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    args = _parse(arguments)
    clock, device = StopWatch(), open_device(args.device)
    if args.paths:
        return _paths(args, device, clock)
    with tempfile.TemporaryDirectory() as temporary:
        root = args.directory or Path(temporary)
        checkpoint = write_checkpoint(root / "checkpoint", args.shape, args.precision)
        clock.done("checkpoint", f"{args.shape.parameters / 1e9:.3f} billion weights")
        engine = root / "engine"
        requests = {
            batch: make_requests(batch, args.context, args.tokens, args.frame) for batch in args.batch
        }
        config = plan_export(checkpoint, ExportOptions(precision=args.precision)).config
        prompts = {
            batch: [prompt_ids(checkpoint, config, request) for request in requests[batch]]
            for batch in args.batch
        }
        prompt = len(prompts[args.batch[0]][0])
        sizes = _sizes(max(args.batch), prompt, prompt + args.tokens)
        rounded = {} if args.quantize is None else {"quantize": args.quantize, "group_size": args.group_size}
        export(
            checkpoint,
            engine,
            precision=args.precision,
            **sizes,
            **rounded,
        )
        clock.done("export")
        if device.name == "tensorrt":
            from edgellm_ros.builder.tensorrt.plan import build_plans

            build_plans(engine, lambda: device)
            clock.done("plans")
        bandwidth = copy_bandwidth(device)
        clock.done("bandwidth", f"{bandwidth / 1e9:.1f} GB/s")
        answers: dict[int, list[list[int]]] = {}
        ours = _run(args, engine, device, bandwidth, clock, requests, prompt, answers)
        theirs: dict[str, Any] | None = None
        if args.transformers and all(map(importlib.util.find_spec, ("torch", "transformers"))):
            gc.collect()
            theirs = {}
            try:
                _run_transformers(args, checkpoint, clock, requests, prompts, answers, theirs)
            except Exception as error:  # a compiler's or memory error is a result too; ours are kept
                theirs["error"] = f"{type(error).__name__}: {error}"
                clock.done("transformers", theirs["error"])
    return finish(
        "decode",
        changes=changed(_runtime_options(args)) | sizes,
        shape=asdict(args.shape),
        parameters=args.shape.parameters,
        precision=args.precision,
        quantize=args.quantize,
        group_size=args.group_size if args.quantize else None,
        device=args.device,
        **machine(device),
        context=args.context,
        frame=args.frame,
        prompt_tokens=prompt,
        tokens=args.tokens,
        runs=args.runs,
        copy_bandwidth_bytes_per_s=bandwidth,
        **ours,
        transformers=theirs,
        seconds=clock.seconds,
    )


def _runtime_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the runtime: every prompt is computed whole."""
    return {"prefix_cache_bytes": 0, "decode": args.decode, "cuda_graphs": args.graphs}


def _sizes(batch: int, prompt: int, capacity: int) -> dict[str, int]:
    """Return the sizes that the engine is exported with, by their names."""
    return {"max_batch_size": batch, "max_input_len": prompt, "max_kv_cache_capacity": capacity}


def _paths(args: argparse.Namespace, device: Device, clock: StopWatch) -> dict[str, Any]:
    """Measure the paths that users take; see `decode_paths`."""
    with tempfile.TemporaryDirectory() as temporary:
        root, folder = args.directory or Path(temporary), Path(temporary)
        if args.checkpoint is not None:
            checkpoint, request = args.checkpoint, scene_request(folder, args.tokens)
        else:
            checkpoint = write_checkpoint(root / "checkpoint", args.shape, args.precision)
            request = random_request(args.context, args.tokens)
        clock.done("checkpoint")
        engine, has_shape = root / "paths_engine", args.checkpoint is None
        sizes = export_for_paths(checkpoint, engine, args.precision, request, has_shape)
        clock.done("export")
        # An answer of the demo's model takes a millisecond on a GPU: more of them.
        answers = args.runs * (4 if has_shape else 20)
        found = measure_paths(engine, device, request, answers, folder)
        clock.done("paths")
    return finish(
        "decode_paths",
        changes=changed(LOOP_OPTIONS) | sizes,
        model=str(args.checkpoint) if args.checkpoint else asdict(args.shape),
        precision=args.precision,
        device=args.device,
        **machine(device),
        context=None if args.checkpoint else args.context,
        **found,
        seconds=clock.seconds,
    )


def _run(
    args: argparse.Namespace,
    engine: Path,
    device: Device,
    bandwidth: float,
    clock: StopWatch,
    requests: dict[int, list[LLMGenerationRequest]],
    prompt: int,
    answers: dict[int, list[list[int]]],
) -> dict[str, Any]:
    """Load the engine, decode batches of each size and put the tokens into `answers`."""
    profile = KernelProfile(device.synchronize) if args.profile else None
    batches, kernels = [], {}
    gc.collect()
    before = used_bytes(device)
    with PeakMemory(device) as memory:
        runtime = LLMInferenceRuntime(engine, device=device, **_runtime_options(args))
        clock.done("load", f"fused kernels decode batches of up to {runtime.fused_rows}")
        graphs = args.graphs and runtime.capture_decoding_cuda_graph()  # have been recorded: nothing is done
        for batch in args.batch:
            for _ in range(WARM_UP_RUNS):
                responses = decode(runtime, requests[batch])
            answers[batch] = [response.token_ids for response in responses]
        clock.done("warm_up")
    with runtime:
        for batch in args.batch:
            figures = measure(runtime, device, requests[batch], args.runs)
            moved = bytes_per_step(args.shape, args.precision, batch, prompt, args.tokens)
            if args.quantize is not None:
                moved["weights"] = inspect(engine).parts[0].weight_bytes
            figures["bytes_per_step"] = moved
            rate = sum(moved.values()) / figures["decode_ms"]["median"] * 1e3
            figures["share_of_copy_bandwidth"] = rate / bandwidth
            batches.append(figures)
            clock.done(f"decode_{batch}", _line(figures))
            if profile is not None:
                kernels[str(batch)] = profile_steps(runtime, requests[batch], profile)
                print(format_table(kernels[str(batch)]), file=sys.stderr)
        in_use, fused_rows = used_bytes(device) - before, runtime.fused_rows
    width = BYTES_PER_VALUE[args.precision]
    weights = args.shape.parameters * width
    if args.quantize is not None:
        saved = args.shape.parameters_per_step * width - inspect(engine).parts[0].weight_bytes
        weights -= saved
    cache = max(args.batch) * (prompt + args.tokens) * args.shape.cache_values_per_token * width
    states = 2 * max(args.batch) * args.shape.state_bytes
    overhead = in_use / (weights + cache + states) - 1
    clock.done("close", f"{in_use / 1e9:.3f} GB were in use, {overhead:.1%} over weights, KV rows, states")
    return {
        "cuda_graphs": bool(graphs),
        "fused_rows": fused_rows,
        "batches": batches,
        "memory_bytes": {
            "weights": weights,
            "kv_cache": cache,
            "states": states,
            "in_use": in_use,
            "peak": max(memory.peak - before, in_use),
        },
        "memory_overhead": overhead,
        "kernels": kernels or None,
    }


def _run_transformers(
    args: argparse.Namespace,
    checkpoint: Path,
    clock: StopWatch,
    requests: dict[int, list[LLMGenerationRequest]],
    prompts: dict[int, list[list[int]]],
    answers: dict[int, list[list[int]]],
    theirs: dict[str, Any],
) -> None:
    """Put times and equal tokens by mode and batch size into `theirs`."""
    import torch
    import transformers

    from benchmarks.transformers_decode import TransformersDecoder

    theirs |= {"version": transformers.__version__, "torch": torch.__version__}
    place = "cpu" if args.device == "cpu" else "cuda"
    model = TransformersDecoder(checkpoint, args.shape, args.precision, place)
    clock.done("transformers_load")
    ways = {way: getattr(model, way) for way in ("eager", "compiled") if getattr(args, way)}
    if not args.compiled_prefill and args.compiled:
        ways["compiled"] = partial(model.compiled, prefill=False)
    for way, run in ways.items():
        theirs[way] = []
        for batch, expected in answers.items():
            images = [image for request in requests[batch] for image in request.images]
            result = run(prompts[batch], images, args.tokens, args.runs)
            same = min(map(_same_beginning, expected, result.pop("token_ids")))
            theirs[way].append({"batch": batch, **result, "same_tokens": same})
            phase = f"transformers_{way}_{batch}"
            clock.done(phase, f"{_stages(result)}, {same} tokens the same")


def _stages(times: dict[str, float]) -> str:
    """Format the stages' times in milliseconds."""
    shown = [(stage, times.get(f"{stage}_ms")) for stage in ("pixels", "vision", "prefill", "first_token")]
    stages = [f"{stage} {time:.2f} ms" for stage, time in shown if time is not None]
    return ", ".join([*stages, f"decode {times['decode_ms']:.3f} ms per token"])


def _line(figures: dict[str, Any]) -> str:
    share, host = figures["share_of_copy_bandwidth"], figures["host_us_per_step"]
    medians = {key: value["median"] for key, value in figures.items() if key.endswith("_ms")}
    line = f"{_stages(medians)}, {figures['tokens_per_s']:.1f} tokens/s, "
    line += f"{share:.1%} of the copy bandwidth"
    queue = figures["queue_us_per_step"]
    return line if host is None else f"{line}, host {host:.1f} us per step, {queue:.1f} us of it to queue one"


def _same_beginning(ours: list[int], theirs: list[int]) -> int:
    return next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if len(set(pair)) > 1), len(ours))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add_shape(parser, parse_any, (*SHAPES, *MODELS))
    add(
        "--precision",
        choices=BYTES_PER_VALUE,
        default="fp16",
        help="precision of the weights (default: %(default)s)",
    )
    add("--quantize", choices=TYPES, help="round the weights of the layers (default: they keep --precision)")
    add(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        default=128,
        help="inputs that share a scale, with --quantize (default: %(default)s)",
    )
    add("--device", choices=DEVICES, default="cpu", help="device to run on (default: %(default)s)")
    add(
        "--decode",
        choices=DECODES,
        default=AUTO,
        help="what executes decode steps: the engine, the fused kernels, or the faster one (default: "
        "%(default)s)",
    )
    add("--batch", type=numbers(integer(1)), default="1", metavar="N[,N...]", help="batch sizes (default: 1)")
    add(
        "--context",
        type=integer(2),
        default=500,
        metavar="N",
        help="prompt tokens without those of the frame (default: %(default)s)",
    )
    add(
        "--frame",
        type=_frame,
        metavar="WxH",
        help="size of a camera frame in every prompt, for shapes with a vision tower (default: no frame)",
    )
    add(
        "--tokens",
        type=integer(2),
        default=128,
        metavar="N",
        help="generated tokens per sequence (default: %(default)s)",
    )
    add(
        "--runs",
        type=integer(1),
        default=5,
        metavar="N",
        help="timed runs per batch size (default: %(default)s)",
    )
    add("--no-graphs", dest="graphs", action="store_false", help="launch kernels one by one, without graphs")
    add("--paths", action="store_true", help="measure the paths that users take beside this loop")
    add("--checkpoint", type=Path, help="with --paths: real weights in place of a shape; sees a camera frame")
    add("--no-transformers", dest="transformers", action="store_false", help="do not run transformers")
    add("--no-compile", dest="compiled", action="store_false", help="run transformers eager only")
    add(
        "--no-compiled-prefill",
        dest="compiled_prefill",
        action="store_false",
        help="run transformers' prefill eager in the compiled run too: with recurrent layers, whose loops "
        "over the prompt are unrolled, it takes minutes to compile",
    )
    add("--no-eager", dest="eager", action="store_false", help="run transformers compiled only")
    add(
        "--profile", action="store_true", help="profile the kernels of a decode step; needs a GPU and PyTorch"
    )
    add(
        "--directory",
        type=Path,
        help="directory to keep checkpoint and engine in; the checkpoint is reused (default: temporary)",
    )
    args = parser.parse_args(arguments)
    if args.profile and args.device == "cpu":
        parser.error("--profile needs a GPU: expected --device cuda or tensorrt, got cpu")
    if args.frame and getattr(args.shape, "processor", None) is None:
        parser.error("--frame needs a shape with a vision tower")
    if args.checkpoint is not None and not args.paths:
        parser.error("--checkpoint needs --paths")
    args.transformers &= args.quantize is None  # its weights are others
    return args


def _frame(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    return integer(1)(width), integer(1)(height)


if __name__ == "__main__":
    main()
