# SPDX-License-Identifier: Apache-2.0
"""The KV cache of a draft head is that of its engines and of config.json."""

from __future__ import annotations

import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.kernels import load_kernels
from edgellm_ros.runtime.engines.row_states import make_draft_cache
from fixtures.mtp_checkpoints import WRITERS


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """The same model with KV caches of 64 and 96 rows."""
    folder = tmp_path_factory.mktemp("engines")
    checkpoint = WRITERS["mimo"](folder / "checkpoint", 2)
    for rows in (64, 96):
        export(checkpoint, folder / str(rows), max_input_len=32, max_kv_cache_capacity=rows)
    return folder / "64", folder / "96"


def make_cache(config, *engines):
    """Make the cache of `config` for the heads of engine directories."""
    device = CpuDevice()
    heads = [EngineExecutor.open(engine / "draft/model.onnx", device) for engine in engines]
    return make_draft_cache(device, load_kernels(device), EngineConfig.load(config), heads)


def test_the_cache_has_the_capacity_of_the_head(engines):
    config = EngineConfig.load(engines[0])
    assert make_cache(engines[0], engines[0]).capacity == config.draft.cache_capacity(64)


def test_heads_with_another_capacity_are_refused(engines):
    small, large = engines
    for heads in ([large], [small, large]):
        with pytest.raises(EngineError, match=r"key_cache_0 is float32 .*by config\.json its capacity is"):
            make_cache(small, *heads)
