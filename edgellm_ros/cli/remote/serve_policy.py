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
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on; 0.0.0.0 = all (default: %(default)s)",
    )
    parser.add_argument(
        "--port",
        type=arguments.integer(0, 65535),
        default=8000,
        metavar="N",
        help="port to listen on; 0 = any free one, which is printed (default: %(default)s)",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="file with the token that clients must send; needed if other computers can connect",
    )
    parser.add_argument(
        "--no-token", action="store_true", help="let everyone plan who can connect, from other computers too"
    )
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
    from edgellm_ros.openpi.token import read_token
    from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
    from edgellm_ros.serving.policy_server import PolicyServer, ServerOptions, check_host
    from edgellm_ros.serving.policy_service import PolicyService

    if args.token_file and args.no_token:
        raise ValueError("--token-file and --no-token: give one of them")
    token = read_token(args.token_file) if args.token_file else ""
    check_host(args.host, token, args.no_token)
    config = EngineConfig.load(args.engine_dir)
    policy = config.policy
    cameras, state = ((), None) if policy is None else (policy.cameras.names, policy.state)
    keys = read_keys(args, cameras, state is not None)
    options = ServerOptions(
        host=args.host,
        port=args.port,
        token=token,
        max_message_bytes=args.max_message << 20,
        max_clients=args.max_clients,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    with LLMInferenceRuntime(args.engine_dir, **arguments.runtime_options(args, config)) as runtime:
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
            host = f"[{args.host}]" if ":" in args.host else args.host
            print(f"{args.engine_dir}: ws://{host}:{port}", flush=True)

    await server.run(ready)
