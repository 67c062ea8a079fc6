# SPDX-License-Identifier: Apache-2.0
"""Code of TensorRT plans: commands that run engines need --allow-plan-code for it."""

from __future__ import annotations

import io
import json
import sys

import pytest

from edgellm_ros import cli
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.runtime import opening

pytestmark = [
    pytest.mark.slow,
    pytest.mark.only_on("cpu", reason="the option changes nothing on other devices"),
]


@pytest.fixture
def requests(tmp_path):
    path = tmp_path / "requests.json"
    path.write_text(json.dumps([{"prompt": "go", "max_tokens": 1}]))
    return path


@pytest.mark.parametrize("given", [[], ["--allow-plan-code"]])
@pytest.mark.parametrize(
    "command",
    [
        "generate ENGINE --prompt go --max-tokens 1 --action-samples 0",
        "generate ENGINE --requests REQUESTS --out OUT",
        "chat ENGINE",
        "bench ENGINE --runs 1 --max-tokens 1 --action-samples 0",
    ],
)
def test_the_option_allows_the_code_of_plans(command, given, tiny_engine, requests, tmp_path, monkeypatch):
    allowed = []

    def open_device(name, allow_plan_code, stream):
        allowed.append(allow_plan_code)
        return CpuDevice()

    monkeypatch.setattr(opening, "open_device", open_device)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    files = {"ENGINE": str(tiny_engine), "REQUESTS": str(requests), "OUT": str(tmp_path / "out.json")}
    assert cli.main([*(files.get(word, word) for word in command.split()), *given]) == 0
    assert allowed == [bool(given)]
