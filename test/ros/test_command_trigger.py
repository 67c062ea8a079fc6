# SPDX-License-Identifier: Apache-2.0
"""Which command is planned with which frame."""

from __future__ import annotations

import numpy as np

from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.ros.node.planning.command_trigger import Command, CommandTrigger, Pair

GO, STOP, NOTHING = Command("go"), Command("stop"), Command()


def test_on_command_each_command_is_paired_once_in_either_order():
    trigger = CommandTrigger("command")
    assert trigger.on_frame(1) is None
    assert trigger.on_command(GO)[:2] == (GO, 1)
    assert trigger.on_frame(2) is None
    assert trigger.on_command(GO)[:2] == (GO, 2)
    trigger.clear()
    assert trigger.on_command(STOP) is None
    assert trigger.on_frame(3)[:2] == (STOP, 3)
    assert trigger.on_frame(4) is None


def test_on_image_a_command_is_paired_with_every_frame_until_it_is_withdrawn():
    trigger = CommandTrigger("image")
    assert trigger.on_frame(1) is None
    assert trigger.on_command(GO)[:2] == (GO, 1)
    assert trigger.on_frame(2)[:2] == (GO, 2)
    assert trigger.on_frame(3)[:2] == (GO, 3)
    assert trigger.on_command(STOP)[:2] == (STOP, 3)
    assert trigger.on_command(NOTHING) is None
    assert trigger.on_frame(4) is None


def test_on_image_only_another_command_is_new():
    trigger = CommandTrigger("image")
    trigger.on_command(GO)
    assert not trigger.is_new(GO)
    assert trigger.is_new(STOP)
    assert trigger.is_new(NOTHING)


def test_an_empty_command_ends_the_wait_for_a_frame():
    trigger = CommandTrigger("command")
    trigger.on_command(GO)
    trigger.on_command(NOTHING)
    assert trigger.on_frame(1) is None


def test_a_spoken_command_stands_as_a_typed_one_does():
    trigger = CommandTrigger("image")
    spoken = Command(sound=Sound(np.zeros(160, np.float32), 16000))
    assert trigger.on_frame(1) is None
    assert trigger.on_command(spoken)[:2] == (spoken, 1)
    assert trigger.on_frame(2)[:2] == (spoken, 2)
    assert trigger.on_command(NOTHING) is None
    assert trigger.on_frame(3) is None


def test_what_is_spoken_again_is_new():
    trigger = CommandTrigger("image")
    samples = np.zeros(160, np.float32)
    trigger.on_command(Command(sound=Sound(samples, 16000)))
    assert trigger.is_new(Command(sound=Sound(samples, 16000)))


def test_without_a_need_for_frames_a_command_is_paired_at_once():
    trigger = CommandTrigger("command", needs_frame=False)
    assert trigger.on_command(GO)[:2] == (GO, None)
    assert trigger.on_command(STOP)[:2] == (STOP, None)
    assert trigger.on_command(NOTHING) is None


def test_the_first_pair_of_a_command_says_so_in_either_order():
    trigger = CommandTrigger("image")
    assert trigger.on_command(GO) is None
    assert trigger.on_frame(1) == Pair(GO, 1, is_first=True)
    assert trigger.on_frame(2) == Pair(GO, 2, is_first=False)
    assert trigger.on_command(STOP) == Pair(STOP, 2, is_first=True)
    assert trigger.on_frame(3) == Pair(STOP, 3, is_first=False)
    trigger.clear()
    assert trigger.on_command(GO) is None
    assert trigger.on_frame(4) == Pair(GO, 4, is_first=True)


def test_a_command_that_is_paired_once_is_always_first():
    trigger = CommandTrigger("command")
    assert trigger.on_command(GO) is None
    assert trigger.on_frame(1) == Pair(GO, 1, is_first=True)
    assert trigger.on_command(GO) == Pair(GO, 1, is_first=True)
