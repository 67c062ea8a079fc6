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
The loop of `edgellm evaluate arena`: the world, camera trigger, replan interval and simulated latency of
`edgellm demo`, but `handle_request` is called in process. The result therefore depends on the model and not
on topics; `edgellm demo --episodes 50` measures the whole system. With --spoken, speakers and rooms of the
split "test" speak the commands, which pass through the node's voice activity detection. With --lora, an
adapter of the checkpoint answers.

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
from edgellm_arena.driving import expert
from edgellm_arena.episodes.episode import EPISODE_FAMILIES, Outcome, World, dead_ahead_episode, make_episode
from edgellm_arena.evaluation.play import play
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime


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
        "--family",
        choices=EPISODE_FAMILIES,
        help="play episodes of this family only (default: seven of ten random, the others dead_ahead)",
    )
    parser.add_argument(
        "--lora", default="", metavar="NAME", help="LoRA adapter to use (default: the base model)"
    )
    args = parser.parse_args(arguments)
    with LLMInferenceRuntime(common.engine(args)) as runtime:
        runtime.switch_lora_weights(args.lora)
        lora = runtime.active_lora
        episodes = [make_episode(args.seed + number, args.family) for number in range(args.episodes)]
        played = [play(runtime, episode, episode.seed, args.spoken) for episode in episodes]
        ahead = dead_ahead_episode(args.seed)
        drives = [play(runtime, ahead, noise_seed, args.spoken) for noise_seed in range(args.noise_seeds)]
    worlds = [each.world for each in played]
    speeds = [world.mean_speed() for world in worlds]
    sides = [side_of_obstacle(each.world) for each in drives]
    return common.finish(
        "closed_loop",
        episodes=len(played),
        family=args.family,
        spoken=args.spoken,
        lora=lora,
        understood=sum(each.understood for each in played),
        successes=sum(world.outcome is Outcome.SUCCESS for world in worlds),
        collisions=sum(world.outcome is Outcome.COLLISION for world in worlds),
        mean_speed=float(np.mean([speed for speed in speeds if speed] or [0.0])),
        least_clearance=min(world.least_clearance() for world in worlds),
        failed=[world.episode.seed for world in worlds if world.outcome is not Outcome.SUCCESS],
        dead_ahead={
            "noise_seeds": len(drives),
            "left": sides.count("left"),
            "right": sides.count("right"),
            "collisions": sum(each.world.outcome is Outcome.COLLISION for each in drives),
            "successes": sum(each.world.outcome is Outcome.SUCCESS for each in drives),
        },
    )


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
