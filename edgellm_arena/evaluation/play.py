# SPDX-License-Identifier: Apache-2.0
"""Plays arena episodes in process: the runtime is called directly, without topics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edgellm_arena.episodes.closed_loop import Plan, drive
from edgellm_arena.episodes.episode import Episode, World
from edgellm_arena.episodes.scoring import names_target
from edgellm_arena.speech.person import SAY_AT_MOST, person_of
from edgellm_ros.multimodal.audio.sound_stream import utterances_in
from edgellm_ros.multimodal.audio.utterance import UtteranceSettings
from edgellm_ros.multimodal.audio.voice_activity import VoiceActivity
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest


@dataclass(frozen=True)
class Played:
    """An episode that was played to its end."""

    world: World
    answers: tuple[str, ...]  # of each plan
    clipped: int  # steps whose planned action exceeded the robot's limits
    understood: bool  # the first answer names the episode's target and no other solid
    metrics: tuple[Mapping[str, float], ...]  # of each request: seconds per stage


def play(runtime: LLMInferenceRuntime, episode: Episode, noise_seed: int, spoken: bool = False) -> Played:
    """Play one episode to its end, with one noise seed for all of its plans.

    The world, the camera trigger, the replan interval and the simulated latency are those of `edgellm demo`.
    `spoken`: a person says the command in a noisy room, and the node's voice activity detection finds it.
    """
    world = World(episode)
    prompt, audio = episode.command.text, tuple[Sound, ...]()
    if spoken:
        sound = heard(episode)
        prompt, audio = "", () if sound is None else (sound,)
    metrics: list[Mapping[str, float]] = []

    def think(frame: np.ndarray) -> Plan:
        if not prompt and not audio:
            return Plan("", None)  # no command was heard: the robot stays
        request = LLMGenerationRequest(
            prompt=prompt,
            audio=audio,
            images=(frame,),
            history=world.history(),
            speed=world.state.speed,
            action_samples=1,
            noise_seed=noise_seed,
        )
        response = runtime.handle_request(request)
        metrics.append(response.metrics)
        return Plan(response.text, None if response.actions is None else response.actions[0])

    driven = drive(world, think)
    answers = tuple(plan.text for plan in driven.plans)
    return Played(world, answers, driven.clipped, names_target(answers[0], episode), tuple(metrics))


def heard(episode: Episode) -> Sound | None:
    """Return the last utterance that the node hears in the recording of the command.

    The command is repeated until it is heard. None if it never is.
    """
    voice = VoiceActivity()
    for time in range(SAY_AT_MOST):
        recording = person_of(episode.seed).say(episode.command.text, time)
        utterances = utterances_in(recording, voice, UtteranceSettings())
        if utterances:
            return utterances[-1].sound
    return None
