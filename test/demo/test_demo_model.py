# SPDX-License-Identifier: Apache-2.0
"""What the demo's own model can do, in process.

The model hears people that training never heard, and its adapters change its language and its driving. The
scenes are few; `python -m benchmarks.closed_loop` has many.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_arena.episodes.episode import Episode, Outcome, World, make_episode
from edgellm_arena.episodes.scoring import names_target
from edgellm_arena.evaluation.play import heard, play
from edgellm_arena.words.german import is_german
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest

pytestmark = pytest.mark.slow

SEEDS = range(16)
DRIVEN = 2  # of the episodes; the others are only asked about


@pytest.fixture(scope="module")
def runtime(arena_engine, runtime_device):
    with LLMInferenceRuntime(arena_engine, runtime_device) as runtime:
        yield runtime


@pytest.fixture
def adapted(runtime):
    """The runtime, which goes back to the base model after the test."""
    yield runtime
    runtime.switch_lora_weights("base")


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    return [make_episode(seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def spoken(episodes):
    """The command of each episode, as the node hears it."""
    return [heard(episode) for episode in episodes]


def ask(episode, **told) -> LLMGenerationRequest:
    return LLMGenerationRequest(**{"prompt": "", **told}, images=(World(episode).camera(),))


def answers_to(runtime, episodes, sounds) -> list[str]:
    """What the base model says in each episode to a sound."""
    requests = [ask(episode, audio=(sound,)) for episode, sound in zip(episodes, sounds, strict=True)]
    return [runtime.handle_request(request).text for request in requests]


def count_understood(answers, episodes) -> int:
    return sum(names_target(text, episode) for text, episode in zip(answers, episodes, strict=True))


def test_commands_spoken_by_unheard_people_are_understood(runtime, episodes, spoken):
    answers = answers_to(runtime, episodes, spoken)
    assert count_understood(answers, episodes) >= 15, answers


def test_without_the_right_sound_the_picture_does_not_tell(runtime, episodes, spoken):
    """The commands of other episodes; else understanding would say little."""
    answers = answers_to(runtime, episodes, spoken[1:] + spoken[:1])
    assert count_understood(answers, episodes) <= 5, answers


@pytest.mark.parametrize("way", ["typed", "spoken"])
def test_the_german_adapter_says_the_same_in_german(runtime, episodes, spoken, way):
    right = 0
    for episode, sound in list(zip(episodes, spoken, strict=True))[:12]:
        told = {"prompt": episode.command.text} if way == "typed" else {"audio": (sound,)}
        base = runtime.handle_request(ask(episode, **told, lora="base")).text
        answer = runtime.handle_request(ask(episode, **told, lora="german")).text
        assert answer != base
        right += is_german(answer) and names_target(answer, episode)
    assert right >= 11


def test_the_cautious_adapter_says_so_and_drives_slower(adapted, episodes):
    driven = episodes[:DRIVEN]
    base = [play(adapted, episode, noise_seed=1) for episode in driven]
    adapted.switch_lora_weights("cautious")
    cautious = [play(adapted, episode, noise_seed=1) for episode in driven]
    assert "careful" in adapted.handle_request(ask(driven[0], prompt=driven[0].command.text)).text
    speeds = [np.mean([each.world.mean_speed() for each in played]) for played in (cautious, base)]
    assert speeds[0] < 0.8 * speeds[1]
    arrived = sum(each.world.outcome is Outcome.SUCCESS for each in cautious)
    assert arrived == DRIVEN
