# SPDX-License-Identifier: Apache-2.0
"""Runtimes on the tiny engine and on a variant that triggers trajectories.

The runtimes have no prefix cache; test_prefix_reuse.py is about runtimes that have one.
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
    """Token ids of the greedy answer to `request(images=(IMAGE,))`."""
    return runtime.handle_request(request(images=(IMAGE,), max_tokens=30)).token_ids


@pytest.fixture(scope="session")
def trigger_index(words) -> int:
    """Index in `words` of the token that `acting_engine` uses as future-start token.

    The token occurs at no earlier index.
    """
    return next(i for i in range(5, len(words)) if words[i] not in words[:i])


@pytest.fixture(scope="session")
def acting_engine(tiny_engine, words, trigger_index, tmp_path_factory) -> Path:
    """Engine directory whose model triggers a trajectory after `trigger_index` tokens."""
    return triggering(tiny_engine, tmp_path_factory.mktemp("acting") / "engine", words[trigger_index])


@pytest.fixture(scope="session")
def acting_draft_engine(draft_engine, words, trigger_index, tmp_path_factory) -> Path:
    """The model of `acting_engine` with the draft head of `draft_engine`."""
    return triggering(draft_engine, tmp_path_factory.mktemp("acting") / "draft", words[trigger_index])


def triggering(engine: Path, directory: Path, token: int) -> Path:
    """Copy an engine directory; in the copy this token triggers trajectories."""
    shutil.copytree(engine, directory)
    config = EngineConfig.load(directory)
    action = dataclasses.replace(config.action, future_start_token_id=token)
    stops = (*config.stop_token_ids, token)
    dataclasses.replace(config, action=action, stop_token_ids=stops).save(directory)
    return directory


@pytest.fixture(scope="session")
def draft_engine(tiny_checkpoint, tmp_path_factory) -> Path:
    """Engine directory with a random draft head, and with the adapters `a` and `b`."""
    from edgellm_ros.builder import export
    from fixtures.random_head import base_config, write_random_head
    from fixtures.tiny_adapter import write_adapter

    directory = tmp_path_factory.mktemp("draft")
    head = write_random_head(directory / "head", base_config(tiny_checkpoint))
    export(tiny_checkpoint, directory / "engine", draft=head, max_lora_rank=8)
    for seed, name in enumerate("ab"):
        write_adapter(directory / "engine" / "lora" / name, tiny_checkpoint, seed=seed, r=4)
    return directory / "engine"


@pytest.fixture(scope="session")
def acting_runtime(acting_engine, device):
    with LLMInferenceRuntime(acting_engine, device, prefix_cache_bytes=0) as runtime:
        yield runtime
