# SPDX-License-Identifier: Apache-2.0
"""The benchmark `request_soak`: requests of each kind end as they must."""

from __future__ import annotations

import pytest

from benchmarks.adapter_cost import write_adapter
from benchmarks.random_checkpoint import write_checkpoint
from benchmarks.request_soak import KINDS, SHAPE, SIZES, Soak
from edgellm_ros.builder import export
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    export(write_checkpoint(folder / "checkpoint", SHAPE, "fp32"), folder / "engine", **SIZES)
    write_adapter(folder / "a", folder / "engine", 3)
    return folder


@pytest.fixture
def soak(folder):
    with LLMInferenceRuntime(folder / "engine") as runtime:
        for name in ("a", "b"):
            runtime.add_lora(name, folder / "a")
        yield Soak(runtime, {"a": folder / "a"}, seed=0)


def test_requests_of_each_kind_have_a_proper_end(soak):
    for number in range(200):
        soak.ask(number)
    assert not soak.lost
    assert {end.partition(":")[0] for end in soak.ended} == set(KINDS)


def test_a_request_with_another_error_is_lost(soak, monkeypatch):
    def fail(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(soak._runtime, "submit", fail)
    soak.ask(0)
    assert len(soak.lost) == 1
    assert soak.lost[0].endswith("RuntimeError: broken")
