# SPDX-License-Identifier: Apache-2.0
"""Episodes of the arena as items of an evaluation: each is named by its seed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import cv2
import numpy as np

from edgellm_arena.driving import expert
from edgellm_arena.episodes.episode import make_episode
from edgellm_arena.evaluation.play import Played, play
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.evaluation.task import Outcome, Run, engine_digest
from edgellm_ros.hearing.transcriber import Transcriber
from edgellm_ros.runtime.decoding.speculative.drafting_config import OFF
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime


@dataclass(frozen=True)
class ArenaTask:
    """Plays episodes with an engine.

    Equal options give equal results on computers of one kind.
    """

    engine_dir: Path
    engine: str  # digest of the engine directory and the adapter
    device: str
    decode: str
    # Part of the options: the number of threads changes the order of summation in some products.
    threads: int
    lora: str
    spoken: bool
    family: str | None  # of all episodes; None: as the seed decides
    workers: int  # that are at work at the same time
    speech_engine_dir: Path | None = None  # engine that transcribes the spoken commands
    speech_engine: str = ""  # digest of it

    failures: ClassVar = (EngineError,)
    # NumPy's products of the arena are small.
    environment: ClassVar[Mapping[str, str]] = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

    @property
    def cores(self) -> int:
        """Return the number of cores that one worker keeps busy."""
        return self.threads

    @property
    def gpus(self) -> int:
        """Return the number of GPUs that one worker needs."""
        return int(self.device != "cpu")

    @contextmanager
    def open(self) -> Iterator[Run]:
        """Load the engines.

        ValueError if one is not that of the evaluation.
        """
        cv2.setNumThreads(self.threads)
        _check_digest(self.engine_dir, self.lora, self.engine)
        # An episode must not depend on those before it, nor on the computer's speed: on some models a reused
        # prefix changes numbers by rounding, and so do drafts, which measured times pause.
        options: dict[str, Any] = {
            "threads": self.threads,
            "prefix_cache_bytes": 0,
            "decode": self.decode,
            "drafting": OFF,
        }
        with ExitStack() as opened:
            runtime = opened.enter_context(LLMInferenceRuntime(self.engine_dir, self.device, **options))
            runtime.switch_lora_weights(self.lora)
            transcriber = None
            if self.speech_engine_dir is not None:
                _check_digest(self.speech_engine_dir, "", self.speech_engine)
                transcriber = opened.enter_context(
                    Transcriber(self.speech_engine_dir, self.device, **options)
                )

            def run(item: str) -> Outcome:
                episode = make_episode(int(item), self.family)
                played = play(runtime, episode, episode.seed, self.spoken, transcriber)
                return {"result": _result(played), "measured": self._measured(played)}

            yield run

    def _measured(self, played: Played) -> dict[str, Any]:
        return {
            "plan_s": [float(metrics["total_s"]) for metrics in played.metrics],
            "first_words_s": [float(metrics["first_token_s"]) for metrics in played.metrics],
            "workers": self.workers,
        }


def _check_digest(engine_dir: Path, lora: str, expected: str) -> None:
    if engine_digest(engine_dir, lora) != expected:
        raise ValueError(f"{engine_dir}: not the engine with which the evaluation began")


def _result(played: Played) -> dict[str, Any]:
    world = played.world
    episode, scene, track = world.episode, world.scene, world.track
    target, start = scene.solids[episode.target], episode.start
    clearance = world.least_clearance()
    return {
        "outcome": world.outcome.value,
        "family": episode.family,
        "command": episode.command.text,
        "understood": played.understood,
        "time": world.time,  # s, simulated
        "plans": len(played.answers),
        "clipped_actions": played.clipped,
        "mean_speed": world.mean_speed(),
        "least_clearance": clearance if math.isfinite(clearance) else None,  # None: the target is alone
        "distance": target.surface_distance(start.x, start.y),
        "end_distance": target.surface_distance(world.state.x, world.state.y),
        "driven": float(np.hypot(*np.diff(track[:, :2], axis=0).T).sum()),
        "obstacles": sum(solid.is_obstacle for solid in scene.solids),
        "in_the_way": len(expert.blocking(scene, start, episode.target)),
        "track_sha256": hashlib.sha256(track.tobytes()).hexdigest(),
    }
