# SPDX-License-Identifier: Apache-2.0
"""Message definitions for the bag library: ROS 2 Jazzy's, and our own from the package's .msg files."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path

from rosbags.typesys import Stores, get_types_from_msg, get_typestore
from rosbags.typesys.store import Typestore

import edgellm_ros


@functools.cache
def typestore() -> Typestore:
    """Every message type that this package speaks. FileNotFoundError if our own definitions are nowhere."""
    store = get_typestore(Stores.ROS2_JAZZY)
    for path in sorted(definition_folder(edgellm_ros.__path__).glob("*.msg")):
        # Without comments: the library takes them for a part of string constants.
        text = re.sub(r"[ \t]*#.*", "", path.read_text(encoding="utf-8"))
        store.register(get_types_from_msg(text, f"edgellm_ros/msg/{path.stem}"))
    return store


def definition_folder(package: Iterable[str]) -> Path:
    """The folder of our .msg files, given the folders of the Python package.

    Where the interfaces are compiled it is the one that they were compiled from, <prefix>/share/edgellm_ros;
    otherwise that of the clone. FileNotFoundError if there is neither.
    """
    folders = [Path(folder).resolve() for folder in package]
    # <prefix>/lib/python3.x/site-packages/edgellm_ros
    compiled = [f.parents[3] / "share" / "edgellm_ros" / "msg" for f in folders if (f / "msg").is_dir()]
    candidates = [*compiled, *(folder.parent / "msg" for folder in folders)]
    for candidate in candidates:
        if (candidate / "Generation.msg").is_file():
            return candidate
    raise FileNotFoundError(f"no message definitions in {', '.join(map(str, candidates))}")
