# SPDX-License-Identifier: Apache-2.0
"""Plays arena episodes in process: the runtime is called directly, without topics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from edgellm_arena.episodes.closed_loop import Plan, drive
from edgellm_arena.episodes.episode import Episode, World
from edgellm_arena.episodes.scoring import names_target
from edgellm_arena.speech.person import SAY_AT_MOST, person_of
from edgellm_ros.hearing.rule import HearingRule
from edgellm_ros.hearing.transcriber import Transcriber
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


def play(
    runtime: LLMInferenceRuntime,
    episode: Episode,
    noise_seed: int,
    spoken: bool = False,
    transcriber: Transcriber | None = None,
) -> Played:
    """Play one episode to its end, with one noise seed for all of its plans.

    The world, the camera trigger, the replan interval and the simulated latency are those of `edgellm demo`.
    `spoken`: a person says the command in a noisy room, and the node's voice activity detection finds it.
    With a transcriber its words are the command, if the node's default rules obey them.
    """
    world = World(episode)
    prompt, audio = episode.command.text, tuple[Sound, ...]()
    if spoken and transcriber is not None:
        prompt = obeyed(episode, transcriber)
    elif spoken:
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


def utterances(episode: Episode) -> Iterator[Sound]:
    """Yield what the node hears of the command each time that a person says it.

    Of a recording with several utterances that is the last; one without any is left out.
    """
    voice = VoiceActivity()
    for time in range(SAY_AT_MOST):
        recording = person_of(episode.seed).say(episode.command.text, time)
        found = utterances_in(recording, voice, UtteranceSettings())
        if found:
            yield found[-1].sound


def heard(episode: Episode) -> Sound | None:
    """Return the first utterance that the node hears; None if it hears none."""
    return next(utterances(episode), None)


def obeyed(episode: Episode, transcriber: Transcriber) -> str:
    """Return the words of the first utterance that the node's default rules obey.

    "" if they obey none.
    """
    rule = HearingRule()
    for sound in utterances(episode):
        verdict = rule.judge(transcriber.transcribe(sound), sound.seconds)
        if verdict.command:
            return verdict.command
    return ""
