# SPDX-License-Identifier: Apache-2.0
"""Whatever a file of a checkpoint holds, an export ends with an error of one line.

`edgellm export --check` reads all that an export reads before it writes.
"""

from __future__ import annotations

import pytest

from edgellm_ros.builder import ExportOptions, check
from fixtures.damage import damaged_copy
from fixtures.draws import draws
from fixtures.groot_checkpoint import ONE_ROBOT, write_groot, write_groot_of_lerobot
from fixtures.groot_n16_checkpoint import ONE_ROBOT_N16, write_groot_n16
from fixtures.internvl_checkpoint import write_internvl_checkpoint
from fixtures.pi_checkpoint import write_openpi, write_pi
from fixtures.policy_folders import of_lerobot_0_3, write_policy_adapter
from fixtures.quantized_checkpoint import write_quantized_checkpoint
from fixtures.qwen3_5_checkpoint import write_whole_qwen3_5_checkpoint
from fixtures.smolvla_checkpoint import write_smolvla
from fixtures.tiny_adapter import write_adapter
from fixtures.tiny_checkpoint import write_tiny_checkpoint

LIMITS = ExportOptions(max_input_len=48, max_kv_cache_capacity=64)
LONGEST = 1500  # characters of an error
SEEDS = draws(4, 12)  # kinds of damage to each file


def with_adapter(directory):
    write_tiny_checkpoint(directory, videos=True)
    write_adapter(directory / "lora" / "polite", directory)


def policy_with_buffers(directory):
    """Write a policy as LeRobot 0.3 did."""
    directory.mkdir()
    whole = write_smolvla(directory.parent / "whole")
    of_lerobot_0_3(whole, directory)


def policy_with_adapter(directory):
    """Write the folder of an adapter; its base is not damaged."""
    directory.mkdir()
    write_policy_adapter(write_smolvla(directory.parent / "whole"), directory)


def groot(directory):
    write_groot(directory, shape=ONE_ROBOT)


def groot_n16(directory):
    write_groot_n16(directory, shape=ONE_ROBOT_N16)


CHECKPOINTS = {
    "sounds, images, actions": (with_adapter, LIMITS),
    "a hybrid with images": (write_whole_qwen3_5_checkpoint, LIMITS),
    "tiles": (write_internvl_checkpoint, LIMITS),
    "4 bits": (lambda directory: write_quantized_checkpoint(directory, "gptq"), LIMITS),
    "a policy": (write_smolvla, ExportOptions()),
    "a pi0.5": (write_pi, ExportOptions()),
    "a pi0.5 of openpi": (write_openpi, ExportOptions()),
    "buffers of a policy": (policy_with_buffers, ExportOptions()),
    "an adapter of a policy": (policy_with_adapter, ExportOptions()),
    "a policy by modality": (groot, ExportOptions()),
    "a policy by modality of N1.6": (groot_n16, ExportOptions()),
    "a policy by modality of LeRobot": (write_groot_of_lerobot, ExportOptions()),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_damaged_file_is_refused_with_one_line_that_names_a_file(tmp_path, kind):
    write, options = CHECKPOINTS[kind]
    checkpoint = tmp_path / "checkpoint"
    write(checkpoint)
    check(checkpoint, options)
    files = [path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()]
    refused = 0
    for seed in range(SEEDS):
        for file in sorted(files):
            damaged = tmp_path / f"{seed}" / file.replace("/", "_")
            told = damaged_copy(checkpoint, damaged, file, seed)
            try:
                check(damaged, options)
            except (ValueError, OSError) as error:
                text = str(error)
                assert len(text.splitlines()) == 1, (told, text)
                assert len(text) < LONGEST, (told, text)
                assert str(damaged) in text, (told, text)
                refused += 1
            except BaseException as error:
                raise AssertionError(f"{told}: {type(error).__name__}: {error}") from error
    assert refused > SEEDS * len(files) / 2
