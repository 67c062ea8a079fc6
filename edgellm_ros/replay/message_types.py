# SPDX-License-Identifier: Apache-2.0
"""Message definitions for the bag library: ROS 2 Jazzy's and ours."""

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
    """Return all message types that are used here.

    Raises FileNotFoundError if our .msg files are not found.
    """
    store = get_typestore(Stores.ROS2_JAZZY)
    for path in sorted(definition_folder(edgellm_ros.__path__).glob("*.msg")):
        # Without comments: the library takes them for a part of string constants.
        text = re.sub(r"[ \t]*#.*", "", path.read_text(encoding="utf-8"))
        store.register(get_types_from_msg(text, f"edgellm_ros/msg/{path.stem}"))
    return store


def definition_folder(package: Iterable[str]) -> Path:
    """Find the folder of our .msg files, given the folders of the Python package.

    Where the interfaces are compiled: their source folder, <prefix>/share/edgellm_ros; otherwise the
    clone's. Raises FileNotFoundError if neither exists.
    """
    folders = [Path(folder).resolve() for folder in package]
    # <prefix>/lib/python3.x/site-packages/edgellm_ros
    compiled = [f.parents[3] / "share" / "edgellm_ros" / "msg" for f in folders if (f / "msg").is_dir()]
    candidates = [*compiled, *(folder.parent / "msg" for folder in folders)]
    for candidate in candidates:
        if (candidate / "Generation.msg").is_file():
            return candidate
    raise FileNotFoundError(f"no message definitions in {', '.join(map(str, candidates))}")
