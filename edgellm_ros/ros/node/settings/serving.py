# SPDX-License-Identifier: Apache-2.0
"""The parameters `serve_*`, of OpenAI's API on the node's runtime."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.ros.parameter_table import declared
from edgellm_ros.serving.listening import Listening, read_listening
from edgellm_ros.serving.openai.extra import check_extra
from edgellm_ros.serving.openai.limits import Limits


@dataclass(frozen=True, kw_only=True)
class ServeParameters:
    """The options of `edgellm serve`, as parameters of the node."""

    serve_port: int = declared(
        0,
        "Port on which the node answers by OpenAI's HTTP API while it is active, for agents and other "
        "programs; their requests come after plans; 0 = off.",
        0,
        65535,
        fixed=True,
    )
    serve_host: str = declared(
        "127.0.0.1",
        "With serve_port: address to listen on. 0.0.0.0 = all, which needs serve_token_file.",
        fixed=True,
    )
    serve_token_file: str = declared(
        "",
        "With serve_port: file with the token that clients must send, read when the node is configured; '' = "
        "no token.",
        fixed=True,
    )
    serve_no_token: bool = declared(
        False,
        "With serve_port: answer everyone who can connect, from other computers too, without a token.",
        fixed=True,
    )
    serve_model_name: str = declared(
        "", "With serve_port: name of the model; '' = that of the engine directory.", fixed=True
    )
    serve_max_requests: int = declared(
        Limits.max_requests,
        "With serve_port: maximum number of requests at a time, those that wait included.",
        1,
        256,
        fixed=True,
    )
    serve_max_tokens: int = declared(
        0,
        "With serve_port: maximum number of tokens of an answer; 0 = as many as the engine has room for.",
        0,
        2**31 - 1,
        fixed=True,
    )
    serve_max_body: int = declared(
        Limits.max_body_bytes >> 20, "With serve_port: maximum size of a request in MiB.", 1, 1024, fixed=True
    )
    serve_max_images: int = declared(
        Limits.max_images, "With serve_port: maximum number of images of a request.", 0, 1024, fixed=True
    )
    serve_max_pixels: int = declared(
        Limits.max_pixels >> 20,
        "With serve_port: maximum number of pixels of an image, in units of 2**20.",
        1,
        1024,
        fixed=True,
    )

    def check_serving(self) -> None:
        """Check what can be checked before engines are loaded.

        ImportError without the packages of a server; ValueError or OSError for a token or a host that cannot
        be used.
        """
        if self.serve_port:
            check_extra("parameter serve_port")
            self.serve_listening()

    def serve_listening(self) -> Listening:
        """Return where to listen.

        ValueError or OSError for a token or a host that cannot be used.
        """
        return read_listening(
            self.serve_host,
            self.serve_port,
            self.serve_token_file,
            self.serve_no_token,
            option=lambda name: f"serve_{name.replace('-', '_')}",
        )

    def serve_limits(self, capacity: int) -> Limits:
        """Return the limits of requests; capacity: tokens of the engine's KV cache."""
        return Limits(
            max_body_bytes=self.serve_max_body << 20,
            max_images=self.serve_max_images,
            max_pixels=self.serve_max_pixels << 20,
            max_tokens=self.serve_max_tokens or capacity,
            max_requests=self.serve_max_requests,
        )
