# SPDX-License-Identifier: Apache-2.0
"""Where a server listens, and who may connect."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from edgellm_ros.echo import printable, quoted


@dataclass(frozen=True)
class Listening:
    """Address and port of a server, and the token that its clients send."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 = any free one
    token: str = ""  # "" = none


def check_host(host: str, token: str, allow_no_token: bool) -> None:
    """Refuse to listen beyond this computer without a token, unless it is allowed.

    ValueError, also for a host that is not known.
    """
    try:
        addresses = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ValueError(f"--host {quoted(host)}: {error.strerror}") from None
    is_local = all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in addresses)
    if not (is_local or token or allow_no_token):
        raise ValueError(
            f"--host {printable(host)}: other computers can connect, which needs --token-file FILE; "
            "--no-token lets all of them in"
        )
