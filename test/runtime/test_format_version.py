# SPDX-License-Identifier: Apache-2.0
"""The keys of an engine directory's files, which `format_version` stands for."""

from __future__ import annotations

import dataclasses
import hashlib
import typing
from collections.abc import Iterator

from edgellm_ros.engine_directory.config import FORMAT_VERSION, EngineConfig
from edgellm_ros.fused.description.decoder import FusedModel
from edgellm_ros.fused.description.draft import FusedDraftModel
from edgellm_ros.fused.description.expert import FusedExpertModel
from edgellm_ros.fused.description.vision import FusedVisionModel

FILES = (EngineConfig, FusedModel, FusedDraftModel, FusedExpertModel, FusedVisionModel)
KEYS_OF_VERSION = (24, "14e4b22ff255042a")


def classes_of(hint: object) -> Iterator[type]:
    """Yield the dataclasses that a type is made of."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
        for each in typing.get_type_hints(hint).values():
            yield from classes_of(each)
    for argument in typing.get_args(hint):
        yield from classes_of(argument)


def test_other_keys_have_another_format_version():
    """Readers are strict: an engine that was exported before lacks a new key.

    Where the keys have changed on purpose, raise FORMAT_VERSION, tell it in docs/engine_directory.md, and
    write both here.
    """
    classes = {each for file in FILES for each in classes_of(file)}
    keys = sorted(f"{each.__name__}.{field.name}" for each in classes for field in dataclasses.fields(each))
    digest = hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]
    assert len(keys) > 100
    assert (FORMAT_VERSION, digest) == KEYS_OF_VERSION
