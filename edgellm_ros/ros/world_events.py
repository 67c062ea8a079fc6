# SPDX-License-Identifier: Apache-2.0
"""The events of a simulated world's process, while other nodes run beside it."""

from __future__ import annotations

import json
import selectors
from collections.abc import Iterator, Sequence
from typing import Any

from edgellm_ros.ros.processes import Child

SILENCE_S = 180.0  # longer than the 90 s after which a world itself reports a missing answer


class DemoError(RuntimeError):
    """An episode that did not finish; the message has the end of the log."""


def world_events(world: Child, nodes: Sequence[Child]) -> Iterator[dict[str, Any]]:
    """Yield the events, lines of JSON in the world's pipe, until the world ends.

    Raises DemoError if the world fails, if a node ends, or after a long time without an event.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(world.stdout, selectors.EVENT_READ)
        silent_s, poll_s = 0.0, 0.5
        while True:
            if selector.select(poll_s):
                line = world.stdout.readline()
                if not line:
                    break
                silent_s = 0.0
                yield json.loads(line)
                continue
            silent_s += poll_s
            _check_alive(nodes)
            if silent_s > SILENCE_S:
                raise DemoError(f"no event from the {world.name} for {SILENCE_S:.0f} s; {_tail(world)}")
    code = world.process.wait()
    _check_alive(nodes)
    if code:
        tails = "\n".join(_tail(child) for child in (world, *nodes))
        raise DemoError(f"the {world.name} ended with exit code {code}; {tails}")


def play_episodes(world: Child, nodes: Sequence[Child], episodes: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a world that plays a number of episodes.

    Raises DemoError as `world_events` does, and if the world ends after fewer outcomes.
    """
    outcomes = 0
    for event in world_events(world, nodes):
        outcomes += event["event"] == "outcome"
        yield event
    if outcomes != episodes:
        raise DemoError(f"the {world.name} ended after {outcomes} of {episodes} episodes; {_tail(world)}")


def _check_alive(nodes: Sequence[Child]) -> None:
    for node in nodes:
        if node.process.poll() is not None:
            raise DemoError(f"the {node.name} ended with exit code {node.process.returncode}; {_tail(node)}")


def _tail(child: Child) -> str:
    return f"the end of {child.log}:\n{child.log_tail()}"
