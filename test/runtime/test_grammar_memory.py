# SPDX-License-Identifier: Apache-2.0
"""Memory of a process whose answers have the largest grammars."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.draws import draws

TEST = Path(__file__).parents[1]
COUNT = draws(12, 42)  # each of the 10 kinds, and the first two again
PROGRAM = """
import sys
from pathlib import Path

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.largest_grammars import largest_grammars


def resident_mb():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line)
    return int(line.split()[1]) / 1000


def answer(**rules):
    sampling = SamplingParams(**rules, temperature=1.5, max_tokens=60)
    return runtime.handle_request(LLMGenerationRequest("go", sampling=sampling))


with LLMInferenceRuntime(sys.argv[1]) as runtime:
    answer(regex="[a-z]*")
    before = resident_mb()
    for grammar in largest_grammars(int(sys.argv[2])):
        assert answer(**grammar).grammar_complete is not None
        print(resident_mb() - before)
"""


@pytest.mark.slow
@pytest.mark.only_on("cpu", reason="grammars are on the host, and the program runs there")
def test_resident_memory_grows_by_at_most_200_mb_with_the_largest_grammars(arena_engine):
    path = os.pathsep.join([str(TEST), str(TEST.parent)])
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(arena_engine), str(COUNT)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    growth = [float(line) for line in run.stdout.split()]
    assert len(growth) == COUNT
    assert max(growth) < 200
