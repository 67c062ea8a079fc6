# SPDX-License-Identifier: Apache-2.0
"""Records what a newer version of LeRobot saves and computes for random policies.

    python test/parity/record_lerobot.py 0.6.1 FOLDER

Two versions cannot be imported in one process. FOLDER gets a folder for each policy of policy_shapes.py, and
one for each step of a processor.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test"), str(Path(__file__).parent)]

import lerobot_policies  # noqa: E402


def record(version: str, folder: Path) -> None:
    lerobot_policies.use(version)
    from act_reference import record_act
    from policy_shapes import ACT_SHAPES, SMOLVLA_SHAPES
    from processor_reference import record_normalisers, record_relative_actions
    from smolvla_reference import record_smolvla

    from edgellm_ros.builder.policies.statistics import NEEDED

    for name in ACT_SHAPES:
        record_act(name, _made(folder / "act" / name), observations=1)
    for name in SMOLVLA_SHAPES:
        record_smolvla(name, _made(folder / "smolvla" / name))
    for way in (*NEEDED, "IDENTITY"):
        record_normalisers(way, 1e-3, _made(folder / "normalisers" / way))
    record_relative_actions(_made(folder / "relative"))
    found = sys.modules["lerobot"].__version__
    if found != version:
        raise SystemExit(f"expected LeRobot {version}, imported {found}")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]))
