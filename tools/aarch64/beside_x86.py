# SPDX-License-Identifier: Apache-2.0
"""Compare aarch64, emulated, with this computer, and run tests there.

    python -m tools.aarch64.beside_x86 FOLDER

FOLDER is what `tools/aarch64/prepare.sh` made. Two emulated processes run beside each other: one answers
requests, with the tokens of this computer and its numbers up to a tolerance, the other runs tests. The exit
code is 1 if something differs or fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import soundfile

from edgellm_arena.speech.person import person_of
from tools.aarch64.answers import PLAN, ROOT, RUNS, SOUND, Run
from tools.aarch64.comparison import DifferenceError, compare

# Modules of tests that calculate, in one process and without a compiler. Emulated: 2 minutes of a core.
TESTS = {
    "kernels": "kernels random sampling tree_kernels",
    "builder": "block_products cpu_variant export families int8_products positive_scales rounded_weights "
    "safetensors_file value_types visible_rows",
    "runtime": "fp8_kv_cache grammar inference_runtime rope row_mapping scripted_decoding tokenizer",
}
SPEAKER = 7  # the seed of a voice and a room
TAIL = 30  # lines of a failed process that are shown


def main() -> int:
    """Print what was compared, and return the exit code."""
    python = Path(sys.argv[1]).resolve() / "python"
    if not python.exists():
        raise SystemExit(f"edgellm_ros: {python} not found: make it with tools/aarch64/prepare.sh")
    answers = ["-m", "tools.aarch64.answers"]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        here, there = folder / "here", folder / "there"
        sound = person_of(SPEAKER).say("go to the red box")
        for side in (here, there):
            side.mkdir()
            soundfile.write(side / SOUND, sound.samples, sound.sample_rate)
        processes = [
            Process("answers on x86_64", [sys.executable, *answers, here], folder / "here.log"),
            Process("answers on aarch64", [python, *answers, there], folder / "there.log"),
            Process("tests on aarch64", [python, *_pytest()], folder / "tests.log"),
        ]
        for process in processes:
            stack.enter_context(process)
        if not all([process.succeeds() for process in processes]):
            return 1
        return 0 if all([_agrees(run, here, there) for run in RUNS]) else 1


class Process:
    """A process in the root folder that writes to a file and ends with its block."""

    def __init__(self, name: str, command: list[Any], log: Path) -> None:
        self.name, self._command, self._log = name, [str(word) for word in command], log

    def __enter__(self) -> Process:
        self._start = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.wait()

    def succeeds(self) -> bool:
        """Wait for its end; print its last line, or more and its exit code if it failed."""
        code = self._process.wait()
        lines = self._log.read_text(errors="replace").splitlines() or ["no output"]
        if code:
            print("\n".join(lines[-TAIL:]))
            print(f"edgellm_ros: {self.name}: failed with exit code {code}, see above")
        else:
            print(f"{self.name}: {time.monotonic() - self._start:.0f} s, {lines[-1].strip('= ')}", flush=True)
        return code == 0


def _pytest() -> list[str]:
    modules = [f"test/{part}/test_{name}.py" for part, names in TESTS.items() for name in names.split()]
    marks = "not slow and not parity and not tensorrt_build"
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *modules]


def _agrees(run: Run, here: Path, there: Path) -> bool:
    """Compare the answers of a run; print the result."""
    answers, others = (json.loads((folder / f"{run.name}.json").read_text()) for folder in (here, there))
    try:
        largest = compare(answers, others, run.tolerance)
        if PLAN in run.requests and "paths" not in largest:
            raise DifferenceError("no trajectory was compared: the model did not decide to drive")
    except DifferenceError as error:
        print(f"edgellm_ros: {run.name}: {error}")
        return False
    numbers = ", ".join(f"{name} by at most {value:.1e}" for name, value in largest.items())
    print(f"{run.name}: tokens of {len(answers)} answers are equal; {numbers} (limit {run.tolerance:.0e})")
    return True


if __name__ == "__main__":
    sys.exit(main())
