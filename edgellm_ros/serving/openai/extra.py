# SPDX-License-Identifier: Apache-2.0
"""The packages that a server of OpenAI's API needs."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = ("starlette", "uvicorn", "h11", "prometheus_client")


def check_extra(what: str) -> None:
    """Raise ImportError in one line if a package is missing; what: needs them."""
    if any(find_spec(name) is None for name in PACKAGES):
        raise ImportError(
            f"{what} needs starlette, uvicorn and prometheus-client: pip install 'edgellm[serve]'"
        )
