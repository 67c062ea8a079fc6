# SPDX-License-Identifier: Apache-2.0
"""`edgellm generate`: requests, from files and a prompt to text and trajectory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from edgellm_ros.cli import arguments
from edgellm_ros.cli.engine_argument import add_engine, engine_directory
from edgellm_ros.cli.requests.answer_output import (
    Streamer,
    action_table,
    describe,
    describe_drafting,
    to_json,
)
from edgellm_ros.cli.requests.request_batches import answer_file
from edgellm_ros.cli.requests.request_files import read_conversation
from edgellm_ros.cli.requests.request_options import add_sampling, common_fields, lora_dirs, sampling_params
from edgellm_ros.io.image_file import read_image
from edgellm_ros.io.number_files import read_history, read_state
from edgellm_ros.messages.engine_readers import file_readers, sound_reader

if TYPE_CHECKING:
    from edgellm_ros.engine_directory.config import EngineConfig
    from edgellm_ros.runtime.request import LLMGenerationRequest, Progress


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to `edgellm`."""
    parser = subparsers.add_parser(
        "generate",
        help="answer a prompt about images, with a trajectory if the model has an action head",
        description="Run one request, or a file of requests. Prints the text to standard output, and times "
        "to standard error.",
    )
    add_engine(parser)
    _add_inputs(parser)
    add_sampling(parser)
    parser.add_argument(
        "--tool-call-format",
        choices=("auto", "none", "hermes", "xml", "llama", "mistral", "nemotron"),
        default="auto",
        help="how the model writes tool calls; auto: as its chat template does (default: %(default)s)",
    )
    _add_action(parser)
    _add_policy(parser)
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
    parser.add_argument(
        "--verbose", action="store_true", help="say on standard error how the answer was drafted too"
    )
    arguments.add_runtime(parser)
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", help="prompt text; optional with --audio")
    parser.add_argument(
        "--messages",
        metavar="FILE",
        help="conversation as JSON, in place of --prompt, as in OpenAI's chat API: a list of messages or an "
        "object with messages, tools and enable_thinking; docs/requests.md has the format, "
        "examples/talk.json an example",
    )
    parser.add_argument(
        "--requests",
        metavar="FILE",
        help="JSON list of requests, answered in batches to the file of --out; sampling options are "
        "defaults; docs/requests.md has the format, examples/requests.json an example",
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
        metavar="NAME[=PATH]",
        help="LoRA adapter to answer with: the one in ENGINE_DIR/lora/NAME, or a PEFT directory or "
        ".safetensors file (default: the base model)",
    )
    parser.add_argument(
        "--history",
        metavar="FILE",
        help="past poses x, y[, heading] in the robot's frame, oldest first: .json, .npy or .csv "
        "(default: straight on at --speed)",
    )
    parser.add_argument(
        "--speed",
        type=arguments.number(0),
        metavar="M/S",
        help="speed now (default: from --history; without both the robot stands still)",
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
        "--denoise-steps",
        type=arguments.integer(1),
        metavar="N",
        help="steps from noise (default: the model's)",
    )
    group.add_argument(
        "--navigation",
        default="",
        metavar="TEXT",
        help="instruction of navigation, for models that take one, such as Alpamayo 1.5",
    )
    group.add_argument(
        "--guidance",
        type=arguments.number(0),
        metavar="WEIGHT",
        help="weight of --navigation in the trajectories: above 1 they follow it more (default: 1)",
    )


def _add_policy(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("policies", "engines that answer with actions only, such as SmolVLA")
    group.add_argument(
        "--state",
        metavar="FILE|V,V,...",
        help="the robot's state in physical units: numbers, or a .json or .npy file with them",
    )
    group.add_argument(
        "--cameras",
        metavar="NAME[,NAME...]",
        help="the camera of each --image (default: all cameras of the policy, in their order)",
    )


def run(args: argparse.Namespace) -> int:
    """Read the inputs, run the request, print the answer."""
    _check_inputs(args)
    args.engine_dir = engine_directory(args.engine_dir, args.device)
    if args.requests is not None:
        return answer_file(args)
    from edgellm_ros.engine_directory.config import EngineConfig
    from edgellm_ros.engine_directory.navigation import check_navigation
    from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime

    streamer = Streamer(sys.stderr if args.json else sys.stdout) if args.stream else None
    config = EngineConfig.load(args.engine_dir)
    request = make_request(args, config, streamer)
    check_navigation(config, request.navigation, request.guidance)  # before engines are loaded
    adapters = lora_dirs(args.lora, args.engine_dir)
    options = {**arguments.runtime_options(args, config), "tool_call_format": args.tool_call_format}
    with LLMInferenceRuntime(args.engine_dir, lora_dirs=adapters, **options) as runtime:
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
        if streamer is None and config.policy is None:
            print(response.text)
        if config.policy is not None:
            print(action_table(response, config.policy.action_space))
        print(describe(response), file=sys.stderr)
        if args.verbose:
            print(describe_drafting(drafted), file=sys.stderr)
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
        for name in ("history", "speed", "navigation", "guidance", "stream", "state", "cameras"):
            if getattr(args, name) not in (None, False, ""):
                raise ValueError(f"--{name} is for one request, not for --requests")
    asked = {"--requests", "--messages", "--prompt", "--audio"} & set(given)
    if not asked and args.prompt is None and args.state is None:  # a policy may need no prompt
        raise ValueError("nothing to answer: give --prompt or --audio, --messages or --requests")


def make_request(
    args: argparse.Namespace, config: EngineConfig, on_progress: Callable[[Progress], None] | None = None
) -> LLMGenerationRequest:
    """Make the request from the options.

    Raises ValueError or FileNotFoundError, whose message names the option or file.
    """
    from edgellm_ros.runtime.request import LLMGenerationRequest

    inputs = {
        "state": None if args.state is None else read_state(args.state),
        "cameras": () if args.cameras is None else tuple(args.cameras.split(",")),
        "history": None if args.history is None else read_history(args.history),
        "speed": args.speed,
        "navigation": args.navigation,
        "guidance": args.guidance,
        "sampling": sampling_params(args),
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
