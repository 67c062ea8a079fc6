# SPDX-License-Identifier: Apache-2.0
"""Mutated folders of policies are refused with one line, or answer as before.

An accepted folder must have the configuration, architecture and weights of the whole one. Values of SETTINGS
are an exception: LeRobot takes them too, and they must have their effect.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from edgellm_ros.builder.checkpoint.checkpoint_config import StrictSection, read_section
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.builder.policies import PolicyModel, PolicySources, find_policy
from edgellm_ros.builder.policies.peft import read_weights
from fixtures.act_checkpoint import write_act
from fixtures.policy_folders import AFTER, BEFORE, of_lerobot_0_3, write_policy_adapter
from fixtures.policy_mutations import (
    REMOVED,
    Mutation,
    file_mutations,
    json_mutations,
    step_mutations,
    tensor_mutations,
    value_mutations,
    weight_mutations,
)
from fixtures.smolvla_checkpoint import write_smolvla

WEIGHTS, IMAGES = "model.safetensors", "observation.images."
pytestmark = pytest.mark.slow
LONGEST = 1500  # characters of an error
POLICIES = {"act": write_act, "smolvla": write_smolvla}
# key of config.json -> what a policy computes by it, and LeRobot's default
SETTINGS = {
    "chunk_size": (lambda model: model.config.action_space.horizon, 50),
    "num_steps": (lambda model: model.config.num_denoise_steps, 10),
    "min_period": (lambda model: architecture(model).min_period, 4e-3),
    "max_period": (lambda model: architecture(model).max_period, 4.0),
    "n_heads": (lambda model: architecture(model).num_heads, 8),
}


class Whole:
    """A folder that is whole, and what an export reads from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = read(self.folder)
        self.unread = [each.name for each in plan_export(self.folder, ExportOptions()).unread]
        self.statistics = sorted(path.name for path in self.folder.glob("policy_*.safetensors"))


def read(folder: Path) -> PolicyModel | None:
    """Read a policy as an export does, without its graphs; None for what is no policy."""
    section = read_section(folder / "config.json")
    policy = find_policy(section)
    if policy is None:
        return None
    section = StrictSection(section.data, section.where)
    weights = read_weights(folder, section)
    return policy.read(folder, section, weights, PolicySources(None, None, None))


def architecture(model: PolicyModel) -> Any:
    return model.parts["action"].args[0]


@pytest.fixture(scope="module", params=list(POLICIES))
def whole(request, tmp_path_factory) -> Whole:
    return Whole(POLICIES[request.param](tmp_path_factory.mktemp(request.param)))


def refusal(folder: Path) -> str | None:
    """Return the error of an export, None if it accepts the folder."""
    try:
        plan_export(folder, ExportOptions())
    except (ValueError, OSError) as error:
        return str(error)
    return None


def wrong_line(text: str, folder: Path, words: tuple[str, ...]) -> str | None:
    """Tell what is wrong with an error.

    The error must be one line that names the folder and one of the words.
    """
    if not text.isprintable():
        return "more than one line"
    if len(text) > LONGEST or str(folder) not in text:
        return "too long, or without the folder"
    after = text.replace(str(folder), "")
    return None if not words or any(word in after for word in words) else f"none of {words}"


def is_as_told(mutation: Mutation, model: PolicyModel, whole: Whole) -> bool:
    """Tell whether a value that LeRobot takes too is what the policy computes by."""
    key = str(mutation.place[-1])
    if key in SETTINGS:
        effect, default = SETTINGS[key]
        return effect(model) == (default if mutation.value is REMOVED else mutation.value)
    if key == "eps":
        return model.config == whole.model.config and architecture(model) != architecture(whole.model)
    # a camera that config.json does not have is none of the policy, whatever its normaliser knows
    camera = key.removeprefix(IMAGES)
    return mutation.value is REMOVED and camera != key and camera not in model.config.cameras.names


def check(whole: Whole, mutations: Iterable[Mutation], directory: Path) -> tuple[int, int]:
    """Check mutations; return how many folders were refused and accepted."""
    failures, refused, accepted = [], 0, 0
    for number, mutation in enumerate(mutations):
        folder = directory / str(number)
        shutil.copytree(whole.folder, folder, copy_function=os.symlink)
        mutation.change(folder)
        try:
            model, wrong = outcome(folder, mutation, whole)
        except Exception as error:  # not one of those that are printed as one line
            model, wrong = None, f"{type(error).__name__}: {error}"
        refused, accepted = refused + (model is None), accepted + (model is not None)
        if wrong:
            failures.append(f"{mutation.told}: {wrong}")
        shutil.rmtree(folder)
    assert not failures, f"{len(failures)} of {refused + accepted}:\n" + "\n".join(failures)
    return refused, accepted


def outcome(folder: Path, mutation: Mutation, whole: Whole) -> tuple[PolicyModel | None, str | None]:
    """Read a mutated folder.

    Returns its policy, or None if it is refused, and what is wrong with that.
    """
    try:
        model = read(folder)
    except (ValueError, OSError) as error:
        return None, wrong_line(str(error), folder, mutation.words)
    same = (
        model is not None
        and model.config == whole.model.config
        and architecture(model) == architecture(whole.model)
    )
    of_weights = mutation.told.startswith(WEIGHTS)
    error = None if same and not of_weights else refusal(folder)
    if error is not None:
        return None, wrong_line(error, folder, mutation.words)
    if of_weights:
        unread = any(fnmatch(str(mutation.place[0]), each) for each in whole.unread)
        return model, None if unread and same else "accepted, but the graphs use it"
    return model, None if same or is_as_told(mutation, model, whole) else "accepted, but another policy"


def test_a_value_of_a_json_file(whole, tmp_path):
    for file in ("config.json", BEFORE, AFTER):
        refused, accepted = check(whole, json_mutations(whole.folder, file), tmp_path)
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
    whole = Whole(of_lerobot_0_3(saved, tmp_path_factory.mktemp("buffers")))
    for mutations in (tensor_mutations, value_mutations):
        refused, accepted = check(whole, mutations(whole.folder, WEIGHTS, "buffer_"), tmp_path)
        assert refused == 2 * accepted > 0


def test_tensors_of_an_adapter(tmp_path_factory, tmp_path):
    """Doubles are left out: PEFT takes them too."""
    folder = tmp_path_factory.mktemp("adapter")
    write_policy_adapter(write_smolvla(tmp_path_factory.mktemp("base")), folder)
    mutations = weight_mutations(folder, "adapter_model.safetensors")
    refused, accepted = check(
        Whole(folder), (each for each in mutations if "doubles" not in each.told), tmp_path
    )
    assert refused > 15
    assert accepted == 0


def test_weights(whole, tmp_path):
    """Of each tensor about one kind of damage, in turns."""
    mutations = itertools.islice(weight_mutations(whole.folder, WEIGHTS), 0, None, 6)
    refused, accepted = check(whole, mutations, tmp_path)
    assert refused > 80
    assert accepted < 0.1 * refused


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
