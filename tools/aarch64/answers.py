# SPDX-License-Identifier: Apache-2.0
"""Answers of the demo's model on this computer's processor.

    python -m tools.aarch64.answers FOLDER

FOLDER has `command.wav`, a spoken command. For each of RUNS it gets an engine directory, and a file with the
answers to its requests, as `edgellm generate --requests` writes them. All commands run in one process, since
emulated imports take 10 s.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm_ros import cli

ROOT = Path(__file__).parents[2]
SOUND = "command.wav"
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue", "green"]}, "metres": {"type": "integer", "maximum": 9}},
    "required": ["colour", "metres"],
    "additionalProperties": False,
}
PLAN: dict[str, Any] = {"prompt": "go to the red box", "images": [str(ROOT / "examples" / "frame.png")]}
PLAN |= {"speed": 0.5, "action_samples": 2, "noise_seed": 1, "denoise_steps": 4}
WORDS: tuple[dict[str, Any], ...] = (
    {"prompt": "what do you see?", "action_samples": 0, "json_schema": SCHEMA},
    {"prompt": "where is the red box?", "action_samples": 0, "lora": "german", "max_tokens": 16},
    {"prompt": "who are you?", "action_samples": 0, "temperature": 1.0, "seed": 7, "max_tokens": 16},
)
SPOKEN: dict[str, Any] = {"audio": [SOUND], "action_samples": 0}


@dataclass(frozen=True)
class Run:
    """An export and the answers of its engine."""

    engine: str
    options: tuple[str, ...]  # of `edgellm export`
    drafting: str
    # of numbers between processors: actions (m/s^2, 1/m), paths (m, rad, m/s), log-probabilities
    tolerance: float
    requests: tuple[dict[str, Any], ...] = (PLAN, *WORDS)

    @property
    def name(self) -> str:
        return f"{self.engine}_{self.drafting}"


RUNS = (
    Run("fp32", (), "off", 1e-4, (PLAN, *WORDS, SPOKEN)),
    Run("fp32", (), "eagle", 1e-4, WORDS),
    Run("int4", ("--quantize", "int4", "--no-report"), "eagle", 1e-4),
    Run("int8", ("--quantize", "int8", "--no-report"), "eagle", 1e-4),
    # rounded inputs of products turn rounding of the rest into steps of 1/127
    Run("cpu_int8", ("--cpu-int8", "--no-report"), "eagle", 0.2),
    Run("int4_cpu_int8", ("--quantize", "int4", "--cpu-int8", "--no-report"), "eagle", 0.2),
)


def main() -> int:
    """Export, answer and return the exit code of the first command that fails, else 0."""
    folder = Path(sys.argv[1])
    for run in RUNS:
        engine, requests = folder / run.engine, folder / f"{run.name}.requests.json"
        requests.write_text(json.dumps([{"logprobs": 1, **request} for request in run.requests]))
        answers = ["--requests", str(requests), "--out", str(folder / f"{run.name}.json")]
        commands = [["generate", str(engine), *answers, "--drafting", run.drafting]]
        if not engine.exists():
            commands.insert(0, ["export", str(ROOT / "models" / "arena"), str(engine), *run.options])
        for command in commands:
            print("edgellm", *command, flush=True)
            code = cli.main(command)
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
