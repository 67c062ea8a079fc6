# SPDX-License-Identifier: Apache-2.0
"""Mutated folders of ACT and SmolVLA are refused, or answer as before."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator

import pytest

from fixtures.act_checkpoint import write_act
from fixtures.draws import draws
from fixtures.mutated_policies import WEIGHTS, Whole, architecture, check, read, refusal, wrong_line
from fixtures.policy_folders import AFTER, BEFORE, of_lerobot_0_3, write_policy_adapter
from fixtures.policy_mutations import (
    Mutation,
    file_mutations,
    json_mutations,
    step_mutations,
    tensor_mutations,
    value_mutations,
    weight_mutations,
)
from fixtures.smolvla_checkpoint import write_smolvla

pytestmark = pytest.mark.slow
STEP = draws(3, 1)  # one of so many mutations is checked
POLICIES = {"act": write_act, "smolvla": write_smolvla}
SETTINGS = {
    "chunk_size": (lambda model: model.config.action_space.horizon, 50),
    "num_steps": (lambda model: model.config.num_denoise_steps, 10),
    "min_period": (lambda model: architecture(model).min_period, 4e-3),
    "max_period": (lambda model: architecture(model).max_period, 4.0),
    "n_heads": (lambda model: architecture(model).num_heads, 8),
}


@pytest.fixture(scope="module", params=list(POLICIES))
def whole(request, tmp_path_factory) -> Whole:
    return Whole(POLICIES[request.param](tmp_path_factory.mktemp(request.param)), SETTINGS)


def some(mutations: Iterator[Mutation], step: int = STEP) -> Iterator[Mutation]:
    return itertools.islice(mutations, 0, None, step)


def test_a_value_of_a_json_file(whole, tmp_path):
    for file in ("config.json", BEFORE, AFTER):
        refused, accepted = check(whole, some(json_mutations(whole.folder, file)), tmp_path)
        assert refused > 20
        assert accepted > 5


def test_the_steps_of_a_processor(whole, tmp_path):
    for file in (BEFORE, AFTER):
        refused, accepted = check(whole, step_mutations(whole.folder, file), tmp_path)
        assert refused >= 10
        assert accepted > 0  # such as two devices


def test_saved_statistics(whole, tmp_path):
    """A file has those of all features, of which a processor uses some."""
    for file in whole.statistics:
        for mutations in (tensor_mutations, value_mutations):
            refused, accepted = check(whole, mutations(whole.folder, file), tmp_path)
            assert refused > 6
            assert accepted > 6


def test_statistics_in_the_weights(tmp_path_factory, tmp_path):
    """As LeRobot 0.3 saved them, beside those of targets, which only training needs."""
    saved = write_smolvla(tmp_path_factory.mktemp("saved"))
    whole = Whole(of_lerobot_0_3(saved, tmp_path_factory.mktemp("buffers")), SETTINGS)
    for mutations in (tensor_mutations, value_mutations):
        refused, accepted = check(whole, mutations(whole.folder, WEIGHTS, "buffer_"), tmp_path)
        assert refused == 2 * accepted > 0


def test_tensors_of_an_adapter(tmp_path_factory, tmp_path):
    """Doubles are left out: PEFT takes them too."""
    folder = tmp_path_factory.mktemp("adapter")
    write_policy_adapter(write_smolvla(tmp_path_factory.mktemp("base")), folder)
    mutations = weight_mutations(folder, "adapter_model.safetensors")
    refused, accepted = check(
        Whole(folder, SETTINGS), (each for each in mutations if "doubles" not in each.told), tmp_path
    )
    assert refused > 15
    assert accepted == 0


def test_weights(whole, tmp_path):
    """Of each tensor, or each third one, about one kind of damage, in turns."""
    mutations = some(weight_mutations(whole.folder, WEIGHTS), 6 * STEP)
    refused, accepted = check(whole, mutations, tmp_path)
    assert refused > 80 / STEP
    assert accepted <= 0.1 * refused


def test_a_file(whole, tmp_path):
    refused, accepted = check(whole, file_mutations(whole.folder), tmp_path)
    assert refused > 40
    assert accepted <= 2  # both files of statistics have those of all features


@pytest.mark.parametrize(
    "name", ["two words", "-rf", "a%20b", "ros{ns}", "ä→", "x" * 200, "config.json", "a'\"b"]
)
def test_the_name_of_the_folder_does_not_matter(whole, tmp_path, name):
    folder = tmp_path / name
    shutil.copytree(whole.folder, folder, copy_function=os.symlink)
    assert read(folder).config == whole.model.config
    (folder / whole.statistics[0]).unlink()
    assert wrong_line(refusal(folder), folder, (whole.statistics[0],)) is None
