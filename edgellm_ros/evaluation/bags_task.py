# SPDX-License-Identifier: Apache-2.0
"""Bags as items of an evaluation, each replayed into its own node and compared."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.evaluation.bags import BagToCompare
from edgellm_ros.evaluation.task import Outcome, Run, engine_digest


@dataclass(frozen=True)
class BagsTask:
    """Replays bags as `edgellm replay` does."""

    bags: Mapping[str, BagToCompare]  # by item
    out: Path  # folder for the output bags
    engine_dir: Path
    engine: str  # digest of the engine directory
    device: str
    remappings: Mapping[str, str]
    tolerance: float
    noise_seed: int | None
    params: Path | None
    lora: str
    standing: bool
    cameras: tuple[str, ...]

    # RuntimeError: ReplayError, and too few free ROS domains
    failures: ClassVar = (RuntimeError, ValueError, OSError, EngineError)
    environment: ClassVar[Mapping[str, str]] = {}
    cores: ClassVar[int] = 1

    @property
    def gpus(self) -> int:
        """Return the number of GPUs that one worker needs."""
        return int(self.device != "cpu")

    @contextmanager
    def open(self) -> Iterator[Run]:
        """Check the engine.

        ValueError if it is not the engine of the evaluation, ImportError without ROS 2.
        """
        from edgellm_ros.ros.processes import require_ros

        require_ros("a replay")
        lora = "" if "=" in self.lora else self.lora
        if engine_digest(self.engine_dir, lora) != self.engine:
            raise ValueError(f"{self.engine_dir}: not the engine with which the evaluation began")
        yield self._run

    def _run(self, item: str) -> Outcome:
        from edgellm_ros.ros.replay.replay import ReplayOptions, run_replay

        bag = self.bags[item]
        out = self.out / bag.name
        self._clear(bag.name)
        start = time.perf_counter()
        options = ReplayOptions(
            bag=bag.bag,
            out=out,
            engine_dir=self.engine_dir,
            device=self.device,
            remappings=self.remappings,
            expect=bag.expect,
            tolerance=self.tolerance,
            noise_seed=self.noise_seed,
            params=self.params,
            lora=self.lora,
            standing=self.standing,
            cameras=self.cameras,
        )
        played = run_replay(options, lambda text: None)
        comparison = played.comparison
        assert comparison is not None
        result = {
            "name": bag.name,
            "equal": comparison.first is None,
            "inputs": played.inputs,
            "became": played.became,
            "outputs": played.outputs,
            **asdict(comparison),
        }
        return {"result": result, "measured": {"seconds": time.perf_counter() - start}}

    def _clear(self, name: str) -> None:
        """Remove outputs of a worker that ended before it reported them, complete or not."""
        unfinished = re.compile(rf"\.{re.escape(name)}\.[^.]+")
        for path in self.out.iterdir() if self.out.is_dir() else ():
            ours = path.name == name or unfinished.fullmatch(path.name)
            if ours and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
