# SPDX-License-Identifier: Apache-2.0
"""Records what a newer version of LeRobot saves and computes for random X-VLAs.

    python test/parity/record_xvla.py 0.6.1 FOLDER

Two versions cannot be imported in one process. FOLDER gets a folder for each policy of xvla_shapes.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test"), str(Path(__file__).parent)]

import lerobot_policies  # noqa: E402


def record(version: str, folder: Path) -> None:
    lerobot_policies.use(version)
    from xvla_reference import record_xvla
    from xvla_shapes import XVLA_SHAPES

    for name in XVLA_SHAPES:
        (folder / name).mkdir(parents=True)
        record_xvla(name, folder / name)
    found = sys.modules["lerobot"].__version__
    if found != version:
        raise SystemExit(f"expected LeRobot {version}, imported {found}")


if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]))
