# SPDX-License-Identifier: Apache-2.0
"""Options of servers: address, port and token."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from edgellm_ros.cli import arguments

if TYPE_CHECKING:
    from edgellm_ros.serving.listening import Listening


def add_listening(parser: argparse.ArgumentParser) -> None:
    """Add the options that `listening_of` reads."""
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
        "--no-token",
        action="store_true",
        help="answer everyone who can connect, from other computers too",
    )


def listening_of(args: argparse.Namespace) -> Listening:
    """Return where to listen.

    ValueError or OSError for a token or a host that cannot be used.
    """
    from edgellm_ros.serving.listening import read_listening

    return read_listening(args.host, args.port, args.token_file or "", args.no_token)
