# SPDX-License-Identifier: Apache-2.0
"""`edgellm serve`: a model for programs that speak OpenAI's API."""

from __future__ import annotations

import argparse
import logging
import sys

from edgellm_ros.cli import arguments
from edgellm_ros.cli.engine_argument import add_engine, engine_directory
from edgellm_ros.cli.remote.listen_options import add_listening, listening_of
from edgellm_ros.serving.listening import url_host
from edgellm_ros.serving.openai.extra import check_extra
from edgellm_ros.serving.openai.limits import Limits


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to `edgellm`."""
    parser = subparsers.add_parser(
        "serve",
        help="answer programs by OpenAI's HTTP API",
        description="Serve a model by OpenAI's API until SIGINT or SIGTERM (docs/serve.md): chat with images,"
        " sounds and tools, completions, embeddings, models, health, metrics. Nothing is fetched by URL.",
    )
    add_engine(parser)
    add_listening(parser)
    parser.add_argument(
        "--model-name", default="", metavar="NAME", help="name of the model (default: that of the folder)"
    )
    parser.add_argument(
        "--max-requests",
        type=arguments.integer(1, 256),
        default=Limits.max_requests,
        metavar="N",
        help="most requests at a time, those that wait included (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=arguments.integer(1),
        default=None,
        metavar="N",
        help="most tokens of an answer (default: as many as the engine has room for)",
    )
    parser.add_argument(
        "--max-body",
        type=arguments.integer(1, 1024),
        default=Limits.max_body_bytes >> 20,
        metavar="MIB",
        help="most MiB of a request (default: %(default)s)",
    )
    parser.add_argument(
        "--max-images",
        type=arguments.integer(0, 1024),
        default=Limits.max_images,
        metavar="N",
        help="most images of a request (default: %(default)s)",
    )
    parser.add_argument(
        "--max-pixels",
        type=arguments.integer(1, 1024),
        default=Limits.max_pixels >> 20,
        metavar="MEGAPIXELS",
        help="most 2**20 pixels of an image (default: %(default)s)",
    )
    arguments.add_runtime(parser)
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    from edgellm_ros.engine_directory.config import EngineConfig
    from edgellm_ros.loaded_objects import leave_out_of_collections
    from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime

    check_extra("`edgellm serve`")
    from edgellm_ros.serving.openai.opening import model_name, open_app
    from edgellm_ros.serving.openai.server import OpenAIServer

    listening = listening_of(args)
    engine_dir = engine_directory(args.engine_dir, args.device)
    config = EngineConfig.load(engine_dir)
    config.check_answers_with_text("`edgellm serve`")
    capacity = config.builder.max_kv_cache_capacity
    limits = Limits(
        max_body_bytes=args.max_body << 20,
        max_images=args.max_images,
        max_pixels=args.max_pixels << 20,
        max_tokens=args.max_tokens or capacity,
        max_requests=args.max_requests,
    )
    name = args.model_name or model_name(args.engine_dir)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    with (
        LLMInferenceRuntime(engine_dir, **arguments.runtime_options(args, config)) as runtime,
        open_app(runtime, name, limits, listening.token) as app,
    ):
        leave_out_of_collections()
        server = OpenAIServer(app.asgi, listening)

        def ready(port: int) -> None:
            if args.json:
                arguments.print_json({"host": listening.host, "port": port, "model": name})
            else:
                print(f"{args.engine_dir}: http://{url_host(listening.host)}:{port}/v1", flush=True)

        server.run(ready)
    return 0
