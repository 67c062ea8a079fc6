# SPDX-License-Identifier: Apache-2.0
"""Where a server listens, and who may connect."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass

from edgellm_ros.echo import printable, quoted
from edgellm_ros.openpi.token import read_token


@dataclass(frozen=True)
class Listening:
    """Address and port of a server, and the token that its clients send."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 = any free one
    token: str = ""  # "" = none


OptionName = Callable[[str], str]  # from the name of an option to how the user writes it


def command_line(name: str) -> str:
    """Return an option as the command line has it: host -> --host."""
    return f"--{name}"


def read_listening(
    host: str, port: int, token_file: str, no_token: bool, *, option: OptionName = command_line
) -> Listening:
    """Return where to listen, with the token in `token_file`; "" = none.

    option: names the options `host`, `token-file` and `no-token` in errors. ValueError or OSError for a token
    or a host that cannot be used.
    """
    if token_file and no_token:
        raise ValueError(f"{option('token-file')} and {option('no-token')}: give one of them")
    token = read_token(token_file) if token_file else ""
    check_host(host, token, no_token, option=option)
    return Listening(host, port, token)


def check_host(host: str, token: str, allow_no_token: bool, *, option: OptionName = command_line) -> None:
    """Refuse to listen beyond this computer without a token, unless it is allowed.

    ValueError, also for a host that is not known.
    """
    try:
        addresses = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ValueError(f"{option('host')} {quoted(host)}: {error.strerror}") from None
    is_local = all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in addresses)
    if not (is_local or token or allow_no_token):
        raise ValueError(
            f"{option('host')} {printable(host)}: other computers can connect, which needs "
            f"{option('token-file')}; {option('no-token')} lets all of them in"
        )


def url_host(host: str) -> str:
    """Return a host as a URL has it."""
    return f"[{host}]" if ":" in host else host
