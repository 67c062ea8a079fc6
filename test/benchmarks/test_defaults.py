# SPDX-License-Identifier: Apache-2.0
"""Benchmarks begin from the defaults that users have, or say what they change."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from benchmarks import common
from edgellm_ros.cli import bench
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig

FOLDER = Path(common.__file__).parent
NAMED = {"LLMInferenceRuntime", "RecordsLater", "NodeProcess", "Transcriber"}


def test_only_options_that_are_not_the_defaults_are_named():
    options = {"device": "cuda", "prefix_cache_bytes": 0, "drafting": "auto", "cuda_graphs": True}
    assert common.changed(options) == {"prefix_cache_bytes": 0}
    assert common.changed(options, {"cuda_graphs": False}) == {"prefix_cache_bytes": 0, "cuda_graphs": False}


def test_changes_are_told_to_people_and_in_the_last_line(capsys):
    common.finish("some", changes={"prefix_cache_bytes": 0, "drafting": SpecDecodeDraftingConfig()}, runs=3)
    told = capsys.readouterr()
    assert told.err.startswith("changed from the defaults: prefix_cache_bytes=0, drafting=SpecDecode")
    last = json.loads(told.out)
    assert last["changed_from_defaults"]["prefix_cache_bytes"] == 0
    assert last["runs"] == 3
    common.finish("some", runs=3)
    told = capsys.readouterr()
    assert told.err == "changed from the defaults: nothing\n"
    assert json.loads(told.out)["changed_from_defaults"] == {}


@pytest.mark.parametrize(
    "file", [*sorted(FOLDER.glob("*.py")), Path(bench.__file__)], ids=lambda file: file.stem
)
def test_a_benchmark_that_changes_a_default_tells_it(file):
    """Options of a runtime or node have a name, for the call that ends the benchmark."""
    source = file.read_text()
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and name_of(node.func) in NAMED]
    literal = [
        f"{name_of(call.func)}: {keyword.arg}={ast.unparse(keyword.value)}"
        for call in calls
        for keyword in call.keywords
        if keyword.arg not in (None, "device", "watched")
        and (file.stem, keyword.arg) not in {("driving_share", "plan_on"), ("decode_paths", "cuda_graphs")}
    ]
    assert not literal
    named = [call for call in calls if any(keyword.arg is None for keyword in call.keywords)]
    if named and file.stem not in ("node_process", "speculation_runs", "decode_paths"):
        assert "changes=" in source or "changed_from_defaults" in source


def name_of(node: ast.expr) -> str:
    """Return the last part of a function's name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
