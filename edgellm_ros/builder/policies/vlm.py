# SPDX-License-Identifier: Apache-2.0
"""Finds the files of a policy's vision language model.

A policy is saved without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

VLM_FOLDER = "vlm"  # of a checkpoint


def find_vlm(
    checkpoint: Path, name: str, given: Path | None, files: Sequence[str], policy: str, *, source: str = ""
) -> Path:
    """Find the folder with files of the vision language model `name` of a policy.

    The folder is `given`, the folder `vlm` of the checkpoint, or the one that the name is; "" names none.
    FileNotFoundError tells where to get the files. policy: "a SmolVLA"; source:
    a sentence about where the files are, in place of a download of `name`.
    """
    own = checkpoint / VLM_FOLDER
    if given is not None:
        folder = given
    else:
        folder = Path(name) if name and not own.is_dir() and Path(name).is_dir() else own
    missing = next((file for file in files if not (folder / file).is_file()), None)
    if missing is None:
        return folder
    listed = " and ".join(each for each in (", ".join(files[:-1]), files[-1]) if each)
    download = f"hf download {name} {' '.join(files)} --local-dir {own}, or " if name else ""
    download = f"{source}; " if source else download
    raise FileNotFoundError(
        f"{folder / missing} not found: {policy} needs {listed} of its vision language model: {download}name "
        "their folder (--vlm)"
    )
