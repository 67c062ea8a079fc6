# SPDX-License-Identifier: Apache-2.0
"""A runtime on the tiny engine, and engines like it with something changed.

These runtimes compute every prompt anew; test_prefix_reuse.py is about those that do not.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.requests_for_tests import IMAGE, request


@pytest.fixture(scope="session")
def runtime(tiny_engine, device):
    with LLMInferenceRuntime(tiny_engine, device, prefix_cache_bytes=0) as runtime:
        yield runtime


@pytest.fixture(scope="session")
def words(runtime) -> list[int]:
    """The greedy answer to `request(images=(IMAGE,))`: what random weights babble."""
    return runtime.handle_request(request(images=(IMAGE,), max_tokens=30)).token_ids


@pytest.fixture(scope="session")
def announcing(words) -> int:
    """Index of a token of `words` that occurs there for the first time: it plays the future-start token."""
    return next(i for i in range(5, len(words)) if words[i] not in words[:i])


@pytest.fixture(scope="session")
def acting_engine(tiny_engine, words, announcing, tmp_path_factory) -> Path:
    """An engine directory whose model announces a trajectory after `announcing` tokens."""
    directory = tmp_path_factory.mktemp("acting") / "engine"
    shutil.copytree(tiny_engine, directory)
    config = EngineConfig.load(directory)
    action = dataclasses.replace(config.action, future_start_token_id=words[announcing])
    stops = (*config.stop_token_ids, words[announcing])
    dataclasses.replace(config, action=action, stop_token_ids=stops).save(directory)
    return directory


@pytest.fixture(scope="session")
def acting_runtime(acting_engine, device):
    with LLMInferenceRuntime(acting_engine, device, prefix_cache_bytes=0) as runtime:
        yield runtime
