# SPDX-License-Identifier: Apache-2.0
"""`edgellm generate`: requests, from files and a prompt to text and trajectory."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from edgellm_ros.cli import arguments
from edgellm_ros.cli.inputs import read_history, read_image
from edgellm_ros.cli.request_files import FileReaders, ReadSound, read_conversation
from edgellm_ros.cli.sound_file import read_sound
from edgellm_ros.cli.video_file import read_video

if TYPE_CHECKING:
    from edgellm_ros.engine_directory.config import EngineConfig
    from edgellm_ros.multimodal.sound import Sound
    from edgellm_ros.runtime.request import (
        LLMGenerationRequest,
        LLMGenerationResponse,
        Progress,
        SamplingParams,
    )


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to `edgellm`."""
    parser = subparsers.add_parser(
        "generate",
        help="answer a prompt about images, with a trajectory if the model has an action head",
        description="Run one request, or a file of requests. Prints the text to standard output, and times "
        "to standard error.",
    )
    arguments.add_engine_dir(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="prompt text; optional with --audio")
    parser.add_argument(
        "--messages",
        metavar="FILE",
        help="conversation as JSON, in place of --prompt: a list of messages, or an object with messages, "
        "tools and enable_thinking; images, videos and sounds are files relative to its folder",
    )
    parser.add_argument(
        "--requests",
        metavar="FILE",
        help="JSON list of requests, answered in batches to the file of --out; sampling options are defaults",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="answers of --requests in the same order, or the error of a failed one"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt (default: none)")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="image file; repeat for several images"
    )
    parser.add_argument(
        "--audio",
        action="append",
        default=[],
        metavar="FILE",
        help="sound file (WAV, FLAC, OGG; any rate) to put before the prompt; repeat for several",
    )
    parser.add_argument(
        "--lora",
        default="",
        metavar="NAME[=DIR]",
        help="LoRA adapter to answer with: the one in ENGINE_DIR/lora/NAME, or a PEFT directory "
        "(default: the base model)",
    )
    parser.add_argument(
        "--history",
        metavar="FILE",
        help="past poses x, y[, heading] in the robot's frame, oldest first: .json, .npy or .csv",
    )
    parser.add_argument(
        "--speed", type=arguments.number(0), metavar="M/S", help="speed now (default: from the history)"
    )
    add_sampling(parser)
    _add_action(parser)
    parser.add_argument(
        "--logprobs",
        type=arguments.integer(0),
        default=0,
        metavar="N",
        help="log-probabilities of the N likeliest tokens",
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="print the text while it is generated (with --json: on standard error)",
    )
    arguments.add_drafting(parser)
    arguments.add_device(parser)
    arguments.add_decode(parser)
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the options of the token sampler."""
    group = parser.add_argument_group(
        "sampling", "what is not given comes from the model's generation_config.json"
    )
    group.add_argument(
        "--temperature",
        type=arguments.number(0),
        metavar="T",
        help="sampling temperature; 0 takes the likeliest token",
    )
    group.add_argument(
        "--top-k", type=arguments.integer(0), metavar="K", help="keep the K likeliest tokens; 0 keeps all"
    )
    group.add_argument(
        "--top-p",
        type=arguments.number(0, 1),
        metavar="P",
        help="keep the smallest set of likeliest tokens with probability P",
    )
    group.add_argument(
        "--min-p",
        type=arguments.number(0, 1),
        metavar="P",
        help="drop tokens below P times the likeliest (default: 0, off)",
    )
    group.add_argument(
        "--repetition-penalty",
        type=arguments.number(0),
        metavar="R",
        help="above 1: make repeated tokens less likely",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text; repeat for several",
    )
    group.add_argument(
        "--seed", type=arguments.SEED, metavar="N", help="seed of the token sampler (default: 0)"
    )
    group.add_argument(
        "--max-tokens", type=arguments.integer(1), metavar="N", help="longest answer in tokens"
    )


def _add_action(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("trajectory")
    group.add_argument(
        "--action-samples",
        type=arguments.integer(0),
        metavar="N",
        help="trajectories to sample (default: 1 if the model has an action head)",
    )
    group.add_argument(
        "--noise-seed", type=arguments.SEED, metavar="N", help="seed of the trajectory noise (default: 0)"
    )
    group.add_argument(
        "--denoise-steps", type=arguments.integer(1), metavar="N", help="Euler steps (default: the model's)"
    )


def run(args: argparse.Namespace) -> int:
    """Read the inputs, run the request, print the answer."""
    _check_inputs(args)
    if args.requests is not None:
        from edgellm_ros.cli.request_batches import answer_file

        return answer_file(args)
    from edgellm_ros.engine_directory.config import EngineConfig
    from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime

    streamer = Streamer(sys.stderr if args.json else sys.stdout) if args.stream else None
    config = EngineConfig.load(args.engine_dir)
    request = make_request(args, config, streamer)
    adapters = lora_dirs(args.lora, args.engine_dir)
    with LLMInferenceRuntime(
        args.engine_dir,
        device=args.device,
        lora_dirs=adapters,
        drafting=arguments.drafting(args, config),
        decode=args.decode,
    ) as runtime:
        response = runtime.handle_request(request)
        drafted = runtime.spec_decode_generation_metrics
    if streamer is not None:
        streamer.finish(response.text)
    if args.json:
        answer = to_json(response, args.logprobs > 0)
        if drafted.strategy:
            answer["tokens_per_verification"] = drafted.tokens_per_verification
        arguments.print_json(answer)
    else:
        if streamer is None:
            print(response.text)
        print(describe(response), file=sys.stderr)
        if drafted.strategy:
            print(
                f"[{drafted.strategy}: {drafted.total_runs} verifications of "
                f"{drafted.tokens_per_verification:.2f} tokens, {drafted.vanilla_runs} steps without draft]",
                file=sys.stderr,
            )
    return 0


def _check_inputs(args: argparse.Namespace) -> None:
    """Check which options are given together; ValueError names them."""
    sources = ("requests", "messages", "prompt", "system", "image", "audio")
    given = [f"--{name}" for name in sources if getattr(args, name) not in (None, "", [])]
    alone = [name for name in given if name in ("--requests", "--messages")]
    if alone and len(given) > 1:
        other = next(name for name in given if name != alone[0])
        raise ValueError(f"{alone[0]} and {other}: give one of them")
    if (args.requests is None) != (args.out is None):
        raise ValueError("--requests and --out are given together")
    if args.requests is not None:
        for name in ("history", "speed", "stream"):
            if getattr(args, name) not in (None, False):
                raise ValueError(f"--{name} is for one request, not for --requests")
    if not {"--requests", "--messages", "--prompt", "--audio"} & set(given) and args.prompt is None:
        raise ValueError("nothing to answer: give --prompt or --audio, --messages or --requests")


def make_request(
    args: argparse.Namespace, config: EngineConfig, on_progress: Callable[[Progress], None] | None = None
) -> LLMGenerationRequest:
    """Make the request from the options.

    Raises ValueError or FileNotFoundError, whose message names the option or file.
    """
    from edgellm_ros.runtime.request import LLMGenerationRequest

    inputs = {
        "history": None if args.history is None else read_history(args.history),
        "speed": args.speed,
        "sampling": sampling_params(args, config),
        "on_progress": on_progress,
        **common_fields(args, config),
    }
    if args.messages is not None:
        conversation = read_conversation(args.messages, file_readers(args.engine_dir, config))
        try:
            return LLMGenerationRequest(**inputs, **conversation)
        except ValueError as error:
            raise ValueError(f"{args.messages}: {error}") from None
    if args.audio and config.audio is None:
        raise ValueError(f"--audio {args.audio[0]}: {args.engine_dir} has no audio encoder")
    sounds = sound_reader(args.engine_dir, config)
    return LLMGenerationRequest(
        prompt=args.prompt or "",
        system_prompt=args.system,
        images=tuple(read_image(path) for path in args.image),
        audio=tuple(sounds(path) for path in args.audio),
        **inputs,
    )


def sound_reader(engine_dir: str, config: EngineConfig) -> ReadSound:
    """Return the function that reads a sound file for an engine."""

    def read(path: str | Path) -> Sound:
        if config.audio is None:
            raise ValueError(f"{path}: {engine_dir} has no audio encoder")
        return read_sound(path, config.audio.max_seconds(config.builder.max_input_len))

    return read


def file_readers(engine_dir: str, config: EngineConfig) -> FileReaders:
    """Return the functions that read sound and video files for an engine."""
    return FileReaders(sound_reader(engine_dir, config), lambda path, fps: read_video(path, fps, config))


def sampling_params(
    args: argparse.Namespace, config: EngineConfig, given: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Return the sampling parameters: `given`, then the options, then the checkpoint's."""
    from edgellm_ros.runtime.request import SamplingParams

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens")
    sampling: dict[str, Any] = {
        name: getattr(config.generation, name)
        for name in ("temperature", "top_k", "top_p", "repetition_penalty")
    }
    sampling.update({name: getattr(args, name) for name in names if getattr(args, name) is not None})
    return SamplingParams(**{**sampling, "stop": tuple(args.stop), **(given or {})})


def common_fields(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """Return the fields of LLMGenerationRequest that the options set for every request."""
    action_samples = args.action_samples
    if action_samples is None:
        action_samples = 0 if config.action is None else 1
    return {
        "lora": args.lora.partition("=")[0],
        "logprobs": args.logprobs,
        "action_samples": action_samples,
        "noise_seed": args.noise_seed,
        "denoise_steps": args.denoise_steps,
    }


def lora_dirs(option: str, engine_dir: str) -> dict[str, Path]:
    """Return the adapter of --lora as {name: directory}; empty for the base model."""
    from edgellm_ros.runtime.lora import find_adapter

    name, given, elsewhere = option.partition("=")
    directory = Path(elsewhere) if given else find_adapter(engine_dir, name)
    return {} if directory is None else {name: directory}


class Streamer:
    """Prints a growing text piece by piece."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._printed = 0

    def __call__(self, progress: Progress) -> None:
        self._print(progress.text, end="")

    def finish(self, text: str) -> None:
        """Print the rest and end the line."""
        self._print(text, end="\n")

    def _print(self, text: str, end: str) -> None:
        print(text[self._printed :], end=end, flush=True, file=self._file)
        self._printed = max(self._printed, len(text))


def to_json(response: LLMGenerationResponse, with_logprobs: bool) -> dict[str, Any]:
    """Return the answer as JSON types.

    `actions` n x T x A and `paths` n x (T + 1) x (x, y, heading, speed) are None without a trajectory.
    """
    result = {
        "text": response.text,
        "token_ids": [int(token) for token in response.token_ids],
        "finish_reason": response.finish_reason,
        "prompt_tokens": response.prompt_tokens,
        "actions": None if response.actions is None else response.actions.tolist(),
        "paths": None if response.paths is None else response.paths.tolist(),
        "noise_seed": int(response.noise_seed),
        "lora": response.lora,
        "metrics": {name: float(value) for name, value in response.metrics.items()},
    }
    if with_logprobs:
        result["logprobs"] = [
            [[int(token), float(value)] for token, value in step] for step in response.logprobs or []
        ]
    return result


def describe(response: LLMGenerationResponse) -> str:
    """Describe tokens, times and trajectories for people, one line each."""
    metrics = response.metrics
    lines = [
        f"[{response.prompt_tokens} prompt tokens, {len(response.token_ids)} new, finish: "
        f"{response.finish_reason}, first token {metrics['first_token_s'] * 1e3:.0f} ms, "
        f"total {metrics['total_s'] * 1e3:.0f} ms]"
    ]
    for index, path in enumerate([] if response.paths is None else response.paths):
        x, y, heading, speed = path[-1]
        end = f"x {x:.2f} m, y {y:.2f} m, heading {math.degrees(heading):.0f} deg, {speed:.2f} m/s"
        lines.append(f"[trajectory {index}: ends at {end}]")
    return "\n".join(lines)
