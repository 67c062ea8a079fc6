# SPDX-License-Identifier: Apache-2.0
"""Reads a file of the node's parameters before ROS does.

ROS itself would write a traceback to the node's log.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm_ros.echo import printable

NODE_KEYS = ("edgellm", "/edgellm", "/**")  # names of the node in a file of parameters


def check_parameters_file(path: Path) -> Path:
    """Return the path; ValueError unless the file has parameters of the node."""
    content = _read(path)
    if not any(name in content for name in NODE_KEYS):
        raise ValueError(
            f"{path}: parameters of {printable(', '.join(map(str, content))) or 'no node'}, expected some "
            f"of {' or '.join(NODE_KEYS)}"
        )
    return path


def cameras_in(path: Path) -> tuple[str, ...]:
    """Return the value of the parameter `cameras` of the node, in any namespace.

    Empty if the file does not set it. ValueError if it is not a file of parameters, or the value no list.
    """
    cameras: Any = []
    for parameters in _of_the_node(path):
        cameras = parameters.get("cameras", cameras)
    if not isinstance(cameras, list):
        raise ValueError(f"{path}: cameras must be a list of names, got {printable(str(cameras))}")
    return tuple(map(str, cameras))


def sets_parameter(path: Path, name: str) -> bool:
    """Return whether a file sets a parameter of the node, in any namespace.

    ValueError if it is not a file of parameters.
    """
    return any(name in parameters for parameters in _of_the_node(path))


def _of_the_node(path: Path) -> list[Mapping[str, Any]]:
    """Return the parameters of each section that is about the node."""
    return [
        node["ros__parameters"] or {}
        for name, node in _read(path).items()
        if str(name).rpartition("/")[2] in ("edgellm", "**")
    ]


def _read(path: Path) -> Mapping[str, Any]:
    """Return the parameters by node."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        content = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a YAML file: {error}") from None
    nodes = content.values() if isinstance(content, dict) else [None]
    if not all(isinstance(node, dict) and "ros__parameters" in node for node in nodes):
        raise ValueError(f"{path}: not a file of ROS parameters: expected NODE: ros__parameters: ...")
    return content
