# SPDX-License-Identifier: Apache-2.0
"""`edgellm bench`: time of each stage, and decoding's share of the memory limit.

Measures
--------
The time of each stage of a plan. Decoding is reported per token, because answers differ in length.

Byte model of one decode step: the language model's weights and the whole KV cache (its static capacity) are
each read once, and the state of recurrent layers is read and written once; activations and the embedding row
are left out. The limit is this number of bytes divided by the bandwidth of a large copy on the same device
(read plus written bytes), measured in the same run. The share can exceed 1 if the model fits into the
device's cache, if attention reads only the filled rows (on a CPU, and for CUDA in half precision), or with
--drafting, where a verification reads the weights once for several tokens.

Conditions
----------
One request at a time (batch 1), in this process, caches warm. Every run is one plan: a fixed synthetic camera
frame, a fixed command, tokens until the model stops or --max-tokens, and one trajectory if the model requests
one. Of an engine for speech to text it is one synthetic sound of up to 5 s, which is encoded once. Every run
recomputes its prompt (no prefix reuse).

Examples
--------
    edgellm bench engines/arena
    edgellm bench engines/arena --runs 50 --device cuda

Last JSON line: `changed_from_defaults`, `stages` (median and p90 in seconds), `decode_step_s`,
`tokens_per_s`, `decode_bytes`, `copy_bandwidth_bytes_per_s`, `share_of_memory_limit`, `drafting`,
`cuda_graphs`, `fused_rows`, `tokens_per_verification`, and with drafting `round_s`: the mean seconds of
draft, verification and acceptance in a round, from runs of their own after the timed ones
(`LLMInferenceRuntime.measure_rounds`).

"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_ros.cli import arguments

if TYPE_CHECKING:
    import numpy as np

    from edgellm_ros.engine_directory.config import EngineConfig
    from edgellm_ros.multimodal.sound import Sound
    from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
    from edgellm_ros.runtime.request import LLMGenerationRequest

COMMAND = "go to the red box"
CHANGED = {"prefix_cache_bytes": 0}  # from the defaults of LLMInferenceRuntime
PART_RUNS = 5  # in which the parts of rounds are measured
STAGES = ("vision_s", "prefill_s", "decode_s", "action_s", "first_token_s", "total_s")
BYTES_PER_VALUE = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to `edgellm`."""
    parser = subparsers.add_parser(
        "bench",
        help="milliseconds per stage, tokens per second and share of the memory limit",
        description="Time one plan at a time: camera frame, answer, trajectory. The last line is JSON.",
    )
    arguments.add_engine_dir(parser)
    parser.add_argument(
        "--runs", type=arguments.integer(1), default=20, metavar="N", help="timed runs (default: %(default)s)"
    )
    parser.add_argument(
        "--warmup",
        type=arguments.integer(0),
        default=3,
        metavar="N",
        help="warm-up runs (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        help=f"command (default: {COMMAND!r}; a synthetic sound if the engine is for speech to text)",
    )
    parser.add_argument("--image", metavar="FILE", help="camera frame (default: a synthetic one)")
    parser.add_argument(
        "--max-tokens",
        type=arguments.integer(1),
        default=40,
        metavar="N",
        help="longest answer (default: %(default)s)",
    )
    parser.add_argument(
        "--action-samples",
        type=arguments.integer(0),
        default=1,
        metavar="N",
        help="trajectories per plan (default: %(default)s)",
    )
    arguments.add_runtime(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure; print a table on standard error and one JSON object on standard output."""
    from edgellm_ros.cli.copy_bandwidth import copy_bandwidth
    from edgellm_ros.engine.device import open_device
    from edgellm_ros.engine_directory.config import EngineConfig
    from edgellm_ros.engine_directory.parts import ACTION, VISUAL, EngineParts
    from edgellm_ros.evaluation.shares import percentile
    from edgellm_ros.io.image_file import read_image
    from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
    from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams

    config = EngineConfig.load(args.engine_dir)
    config.check_answers_with_text("edgellm bench")
    missing = EngineParts(config, args.without).missing
    frame = read_image(args.image) if args.image else synthetic_frame()
    command = "" if config.transcribes else COMMAND
    request = LLMGenerationRequest(
        prompt=command if args.prompt is None else args.prompt,
        audio=(synthetic_sound(config),) if config.transcribes else (),
        images=() if missing(VISUAL) else (frame,),
        sampling=SamplingParams(max_tokens=args.max_tokens),
        action_samples=0 if missing(ACTION) else args.action_samples,
    )
    options = arguments.runtime_options(args, config)
    with LLMInferenceRuntime(args.engine_dir, **CHANGED, **options) as runtime:
        for _ in range(args.warmup):
            runtime.handle_request(request)
        responses = [runtime.handle_request(request) for _ in range(args.runs)]
        drafted, fused_rows = replace(runtime.spec_decode_generation_metrics), runtime.fused_rows
        parts = round_seconds(runtime, request) if drafted.strategy else None

    stages = {}
    for stage in STAGES:
        times = [response.metrics[stage] for response in responses if stage in response.metrics]
        if times:
            stages[stage] = {"median": statistics.median(times), "p90": percentile(sorted(times), 90)}
    tokens = len(responses[0].token_ids)
    # The first token is from the prefill; each other token is one decode step.
    step_s = stages["decode_s"]["median"] / (tokens - 1) if tokens > 1 else None
    model = decode_bytes(args.engine_dir, config)
    bandwidth = copy_bandwidth(open_device(args.device))
    result = {
        "changed_from_defaults": CHANGED,
        "engine": str(args.engine_dir),
        "device": args.device,
        "precision": config.precision,
        "runs": args.runs,
        "prompt_tokens": responses[0].prompt_tokens,
        "tokens": tokens,
        "trajectories": 0 if responses[0].actions is None else len(responses[0].actions),
        "stages": stages,
        "decode_step_s": step_s,
        "tokens_per_s": None if not step_s else 1 / step_s,
        "drafting": drafted.strategy or "off",
        "cuda_graphs": args.cuda_graphs and args.device != "cpu",
        "fused_rows": fused_rows,
        "tokens_per_verification": drafted.tokens_per_verification if drafted.strategy else None,
        "round_s": parts,
        "decode_bytes": model,
        "copy_bandwidth_bytes_per_s": bandwidth,
        "share_of_memory_limit": None if not step_s else sum(model.values()) / bandwidth / step_s,
    }
    _print_table(result)
    arguments.print_json(result)
    return 0


def round_seconds(runtime: LLMInferenceRuntime, request: LLMGenerationRequest) -> dict[str, float] | None:
    """Measure draft, verification and acceptance of rounds: mean seconds of each.

    None if no round was measured.
    """
    metrics, names = runtime.spec_decode_generation_metrics, ("draft", "verify", "accept")
    runtime.measure_rounds()
    runtime.handle_request(request)  # records the parts
    before = replace(metrics)
    for _ in range(PART_RUNS):
        runtime.handle_request(request)
    runtime.measure_rounds(False)
    rounds = metrics.timed_runs - before.timed_runs
    if not rounds:
        return None
    keys = {name: f"{name}_seconds" for name in names}
    return {name: (getattr(metrics, key) - getattr(before, key)) / rounds for name, key in keys.items()}


def decode_bytes(engine_dir: str | Path, config: EngineConfig) -> dict[str, int]:
    """Return the bytes that one decode step moves: {"weights", "kv_cache", "states"}."""
    weights = sum(entry.size for entry in config.files if entry.path == "llm/model.onnx.data")
    llm = config.llm
    rows = 2 * llm.num_attention_layers * llm.num_key_value_heads * config.builder.max_kv_cache_capacity
    width = BYTES_PER_VALUE[config.kv_cache_type]
    state = llm.recurrent.bytes_per_sequence if llm.recurrent else 0
    return {"weights": weights, "kv_cache": rows * llm.head_dim * width, "states": 2 * state}


def synthetic_frame(height: int = 224, width: int = 320) -> np.ndarray:
    """Make a picture RGB uint8 [H, W, 3] that is the same on every machine."""
    import numpy as np

    frame = np.full((height, width, 3), 170, np.uint8)
    frame[height // 4 :] = (120, 110, 100)
    frame[height // 3 : height * 2 // 3, width * 2 // 5 : width * 3 // 5] = (200, 30, 30)
    return frame


def synthetic_sound(config: EngineConfig) -> Sound:
    """Make a sound of 5 s, or as long as an engine takes, that is the same everywhere."""
    import numpy as np

    from edgellm_ros.multimodal.sound import Sound

    assert config.audio is not None
    rate = config.audio.sampling_rate
    longest = int(config.audio.max_seconds(config.builder.max_input_len) * rate) - 1
    time = np.arange(min(5 * rate, longest)) / rate
    return Sound((0.3 * np.sin(2 * np.pi * 200 * time * (1 + 0.1 * time))).astype(np.float32), rate)


def _print_table(result: dict) -> None:
    lines = [
        f"{result['engine']} on {result['device']} ({result['precision']}), {result['runs']} runs, "
        f"{result['prompt_tokens']} + {result['tokens']} tokens, {result['trajectories']} trajectories",
        f"{'stage':<16}{'median ms':>12}{'p90 ms':>12}",
    ]
    lines += [
        f"{stage.removesuffix('_s'):<16}{times['median'] * 1e3:>12.2f}{times['p90'] * 1e3:>12.2f}"
        for stage, times in result["stages"].items()
    ]
    changes = ", ".join(f"{name}={value}" for name, value in result["changed_from_defaults"].items())
    lines.append(f"changed from the defaults: {changes}")
    if result["decode_step_s"]:
        total, bandwidth = sum(result["decode_bytes"].values()), result["copy_bandwidth_bytes_per_s"]
        lines.append(
            f"decode: {result['tokens_per_s']:.0f} tokens/s; {total / 1e6:.1f} MB per token, "
            f"{total / result['decode_step_s'] / 1e9:.1f} GB/s = {result['share_of_memory_limit']:.0%} "
            f"of the copy bandwidth {bandwidth / 1e9:.1f} GB/s"
        )
    if result["round_s"]:
        parts = ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in result["round_s"].items())
        lines.append(f"a round of drafting: {parts}")
    print("\n".join(lines), file=sys.stderr)
