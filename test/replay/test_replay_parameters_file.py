# SPDX-License-Identifier: Apache-2.0
"""The cameras in a file of the node's parameters."""

from __future__ import annotations

import pytest

from edgellm_ros.ros.replay.parameters_file import cameras_in


@pytest.fixture
def file(tmp_path):
    """`file(text)`: the path of a file with this text."""

    def write(text: str):
        path = tmp_path / "params.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("node", ["edgellm", "/edgellm", "/**", "/robot/edgellm"])
def test_are_those_of_the_node_in_any_namespace(file, node):
    path = file(f"{node}: {{ros__parameters: {{cameras: [top, 2]}}}}")
    assert cameras_in(path) == ("top", "2")


@pytest.mark.parametrize("parameters", ["{lora: a}", ""])
def test_are_none_if_the_file_does_not_name_any(file, parameters):
    assert cameras_in(file(f"edgellm: {{ros__parameters: {parameters}}}")) == ()


def test_are_not_those_of_other_nodes(file):
    text = "edgellm: {ros__parameters: {cameras: [top]}}\nfollower: {ros__parameters: {cameras: [left]}}"
    assert cameras_in(file(text)) == ("top",)


def test_the_last_of_several_sections_counts(file):
    text = "/**: {ros__parameters: {cameras: [left]}}\nedgellm: {ros__parameters: {cameras: [top]}}"
    assert cameras_in(file(text)) == ("top",)


def test_must_be_a_list(file):
    with pytest.raises(ValueError, match="cameras must be a list of names, got top"):
        cameras_in(file("edgellm: {ros__parameters: {cameras: top}}"))
