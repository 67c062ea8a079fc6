# SPDX-License-Identifier: Apache-2.0
"""`edgellm serve-policy`: a policy for robots that speak openpi's protocol."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from typing import TYPE_CHECKING

from edgellm_ros.cli import arguments
from edgellm_ros.cli.remote.key_options import add_keys, read_keys
from edgellm_ros.cli.remote.listen_options import add_listening, listening_of
from edgellm_ros.serving.listening import url_host

if TYPE_CHECKING:
    from edgellm_ros.serving.policy_server import PolicyServer


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to `edgellm`."""
    parser = subparsers.add_parser(
        "serve-policy",
        help="answer robots with chunks of actions, by openpi's protocol",
        description="Serve a policy by openpi's websocket protocol until SIGINT or SIGTERM "
        "(docs/remote.md). Any client of openpi gets a chunk of actions for each observation.",
    )
    arguments.add_engine_dir(parser)
    add_listening(parser)
    parser.add_argument(
        "--max-clients",
        type=arguments.integer(1, 1000),
        default=4,
        metavar="N",
        help="most connections at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--max-message",
        type=arguments.integer(1, 1024),
        default=16,
        metavar="MIB",
        help="most MiB of an observation (default: %(default)s)",
    )
    parser.add_argument(
        "--default-prompt", default="", metavar="TEXT", help="task of observations without one"
    )
    add_keys(parser)
    arguments.add_runtime(parser)
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    from edgellm_ros.engine_directory.config import EngineConfig
    from edgellm_ros.loaded_objects import leave_out_of_collections
    from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
    from edgellm_ros.serving.policy_server import PolicyServer, ServerOptions
    from edgellm_ros.serving.policy_service import PolicyService

    listening = listening_of(args)
    config = EngineConfig.load(args.engine_dir)
    policy = config.policy
    cameras, state = ((), None) if policy is None else (policy.cameras.names, policy.state)
    keys = read_keys(args, cameras, state is not None)
    options = ServerOptions(
        listening=listening,
        max_message_bytes=args.max_message << 20,
        max_clients=args.max_clients,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    with LLMInferenceRuntime(args.engine_dir, **arguments.runtime_options(args, config)) as runtime:
        leave_out_of_collections()
        server = PolicyServer(PolicyService(runtime, keys, args.default_prompt), options)
        asyncio.run(_serve(server, args))
    return 0


async def _serve(server: PolicyServer, args: argparse.Namespace) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)

    def ready(port: int) -> None:
        if args.json:
            arguments.print_json({"host": args.host, "port": port})
        else:
            print(f"{args.engine_dir}: ws://{url_host(args.host)}:{port}", flush=True)

    await server.run(ready)
