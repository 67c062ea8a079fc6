# SPDX-License-Identifier: Apache-2.0
"""Driving in closed loop: successes, collisions, and the choice of sides.

Measures
--------
Successes, collisions, speed and clearance over unseen episodes of all kinds, each with its own noise seed.
Then one scene with an obstacle dead ahead under 64 noise seeds: the side on which the robot passes the
obstacle, and its collisions. Targets: at least 90% successes and at most 4% collisions; in the dead-ahead
scene each side at least 10 times, and at least 60 of 64 drives without a collision.

Conditions
----------
`edgellm demo` without ROS: the same world, camera trigger, replan interval and simulated latency, but
`handle_request` is called in process. The result therefore depends on the model and not on topics; `edgellm
demo --episodes 50` measures the whole system. With --spoken, speakers and rooms of the split "test" speak the
commands, which pass through the node's voice activity detection. With --lora, an adapter of the checkpoint
answers.

Examples
--------
    python -m benchmarks.closed_loop
    python -m benchmarks.closed_loop --spoken --episodes 150
    python -m benchmarks.closed_loop --lora cautious

Last JSON line: `successes` and `collisions` of `episodes`, `understood`, `mean_speed`, `least_clearance`, the
seeds of `failed` episodes, and `dead_ahead`.

"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks import common
from edgellm_ros.arena import expert
from edgellm_ros.arena.closed_loop import Plan, drive
from edgellm_ros.arena.episode import Episode, Outcome, World, dead_ahead_episode, make_episode
from edgellm_ros.arena.person import SAY_AT_MOST, person_of
from edgellm_ros.arena.scoring import names_target
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.multimodal.sound_stream import utterances_in
from edgellm_ros.multimodal.utterance import UtteranceSettings
from edgellm_ros.multimodal.voice_activity import VoiceActivity
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__)
    parser.add_argument("--episodes", type=int, default=50, help="number of episodes (default: %(default)s)")
    parser.add_argument(
        "--noise-seeds",
        type=int,
        default=64,
        help="noise seeds of the dead-ahead scene (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=common.SEED, help="seed of the first episode (default: %(default)s)"
    )
    parser.add_argument("--spoken", action="store_true", help="speak the commands instead of typing them")
    parser.add_argument(
        "--lora", default="", metavar="NAME", help="LoRA adapter to use (default: the base model)"
    )
    args = parser.parse_args(arguments)
    with LLMInferenceRuntime(common.engine(args)) as runtime:
        runtime.switch_lora_weights(args.lora)
        lora = runtime.active_lora
        episodes = [make_episode(args.seed + number) for number in range(args.episodes)]
        played = [play(runtime, episode, episode.seed, args.spoken) for episode in episodes]
        ahead = dead_ahead_episode(args.seed)
        drives = [play(runtime, ahead, noise_seed, args.spoken) for noise_seed in range(args.noise_seeds)]
    speeds = [world.mean_speed() for world, _ in played]
    sides = [side_of_obstacle(world) for world, _ in drives]
    return common.finish(
        "closed_loop",
        episodes=len(played),
        spoken=args.spoken,
        lora=lora,
        understood=sum(understood for _, understood in played),
        successes=sum(world.outcome is Outcome.SUCCESS for world, _ in played),
        collisions=sum(world.outcome is Outcome.COLLISION for world, _ in played),
        mean_speed=float(np.mean([speed for speed in speeds if speed] or [0.0])),
        least_clearance=min(world.least_clearance() for world, _ in played),
        failed=[world.episode.seed for world, _ in played if world.outcome is not Outcome.SUCCESS],
        dead_ahead={
            "noise_seeds": len(drives),
            "left": sides.count("left"),
            "right": sides.count("right"),
            "collisions": sum(world.outcome is Outcome.COLLISION for world, _ in drives),
            "successes": sum(world.outcome is Outcome.SUCCESS for world, _ in drives),
        },
    )


def play(
    runtime: LLMInferenceRuntime, episode: Episode, noise_seed: int, spoken: bool = False
) -> tuple[World, bool]:
    """Play one episode to its end, with one noise seed for all of its plans.

    Also returns whether the robot understood the command.
    """
    world = World(episode)
    prompt, audio = episode.command.text, ()
    if spoken:
        sound = heard(episode)
        prompt, audio = "", () if sound is None else (sound,)

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
        return Plan(response.text, None if response.actions is None else response.actions[0])

    driven = drive(world, think)
    return world, names_target(driven.plans[0].text, episode)


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


def side_of_obstacle(world: World) -> str:
    """Return the side on which the robot passed the obstacle on the straight line.

    Returns "none" if the robot never got beside the obstacle.
    """
    episode, track = world.episode, world.track
    solid = world.scene.solids[expert.blocking(world.scene, episode.start, episode.target)[0]]
    beside = np.flatnonzero(track[:, 0] >= solid.x)
    if not beside.size:
        return "none"
    return "left" if track[beside[0], 1] > solid.y else "right"


if __name__ == "__main__":
    main()
