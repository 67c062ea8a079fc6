# SPDX-License-Identifier: Apache-2.0
"""Finds the bags of a folder, each with its expected outputs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from edgellm_ros.echo import printable
from edgellm_ros.evaluation.task import file_digest

METADATA = "metadata.yaml"
SUFFIXES = (".mcap", ".db3")
DIGITS = 16  # of the hash in an item
LISTED = 5  # names in one error


@dataclass(frozen=True)
class BagToCompare:
    """A bag and the output bag that its replay shall give."""

    name: str
    bag: Path
    expect: Path
    item: str  # NAME@HASH: another recording, or another expectation, is another item


def find_bags(folder: Path, expect: Path, outputs: Path | None = None) -> list[BagToCompare]:
    """Find the bags of a folder, by their names.

    outputs: folder of the output bags, which are overwritten. ValueError or FileNotFoundError if there is no
    folder, no bag, a bag without expected outputs, or two bags of one name, or if bags would be overwritten.
    """
    for path in (folder, expect):
        if outputs is not None and path.resolve() == outputs.resolve():
            raise ValueError(f"{path}: the outputs would overwrite these bags, name another --out")
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such folder")
        if not path.is_dir():
            raise ValueError(f"{path}: not a folder")
        if (path / METADATA).is_file():
            raise ValueError(
                f"{path}: is a bag itself, expected a folder of bags; `edgellm replay` plays one bag"
            )
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        is_folder = (path / METADATA).is_file()
        if not is_folder and not (path.is_file() and path.suffix in SUFFIXES):
            continue
        name = path.name if is_folder else path.stem
        if name in found:
            raise ValueError(f"{folder}: {path.name} and {found[name].name} have the same name")
        found[name] = path
    if not found:
        raise ValueError(
            f"{folder}: no bags, expected folders with {METADATA} or {' or '.join(SUFFIXES)} files"
        )
    missing = [name for name in found if not (expect / name / METADATA).is_file()]
    if missing:
        listed = ", ".join(printable(name) for name in missing[:LISTED])
        more = f" and {len(missing) - LISTED} more" if len(missing) > LISTED else ""
        raise ValueError(
            f"{expect}: no expected outputs of {listed}{more}: `edgellm replay BAG --out {expect}/NAME` "
            "records them"
        )
    return [_make(name, path.resolve(), (expect / name).resolve()) for name, path in found.items()]


def _make(name: str, bag: Path, expect: Path) -> BagToCompare:
    digest = (file_digest(bag) + file_digest(expect)).encode()
    return BagToCompare(name, bag, expect, f"{name}@{hashlib.sha256(digest).hexdigest()[:DIGITS]}")
