# SPDX-License-Identifier: Apache-2.0
"""Which command is planned with which frame."""

from __future__ import annotations

from edgellm_ros.ros.trigger import CommandTrigger


def test_on_command_each_command_is_paired_once_in_either_order():
    trigger = CommandTrigger("command")
    assert trigger.on_frame(1) is None
    assert trigger.on_command("go") == ("go", 1)
    assert trigger.on_frame(2) is None
    assert trigger.on_command("go") == ("go", 2)
    trigger.clear()
    assert trigger.on_command("stop") is None
    assert trigger.on_frame(3) == ("stop", 3)
    assert trigger.on_frame(4) is None


def test_on_image_a_command_is_paired_with_every_frame_until_it_is_withdrawn():
    trigger = CommandTrigger("image")
    assert trigger.on_frame(1) is None
    assert trigger.on_command("go") == ("go", 1)
    assert trigger.on_frame(2) == ("go", 2)
    assert trigger.on_frame(3) == ("go", 3)
    assert trigger.on_command("stop") == ("stop", 3)
    assert trigger.on_command("") is None
    assert trigger.on_frame(4) is None


def test_on_image_only_another_command_is_new():
    trigger = CommandTrigger("image")
    trigger.on_command("go")
    assert not trigger.is_new("go")
    assert trigger.is_new("stop")
    assert trigger.is_new("")


def test_an_empty_command_ends_the_wait_for_a_frame():
    trigger = CommandTrigger("command")
    trigger.on_command("go")
    trigger.on_command("")
    assert trigger.on_frame(1) is None
