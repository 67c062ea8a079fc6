# SPDX-License-Identifier: Apache-2.0
"""Plan files: TensorRT's compiled engines, and the record beside each.

A plan says little about itself, and only to TensorRT on a GPU. So `edgellm build` writes a record beside the
plan (`NAME.plan.json`), which every machine can read: library, version, GPUs, size, graph and profiles.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgellm_ros.atomic_file import write_atomically
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.optimization_profile import Profile, Range
from edgellm_ros.strict_json import parse_json

MODEL = "model"  # the name of most graphs
COMPATIBLE = "-compatible"  # ends the name of a version-compatible plan
TENSORRT, RTX = "tensorrt", "tensorrt_rtx"  # libraries that make plans; their Python modules
TITLES = {TENSORRT: "TensorRT", RTX: "TensorRT for RTX"}
TAGS = {TENSORRT: "trt", RTX: "rtx"}  # in names of plans


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """One plan on disk, as its record describes it."""

    path: Path
    library: str  # that made it: TENSORRT or RTX
    version: str  # of the library
    gpus: tuple[str, ...]  # that it runs on, such as "sm_89"
    version_compatible: bool  # later versions of the library and the lean runtime load it too
    bytes: int
    graph_sha256: str  # of the ONNX file from which it was built
    profiles: tuple[Profile, ...]

    def __str__(self) -> str:
        kind = "version-compatible, " if self.version_compatible else ""
        return f"{self.path.name} ({kind}{TITLES[self.library]} {self.version}, for {listed(self.gpus)})"

    def check(self, model: Path) -> None:
        """Raise EngineError unless the file is complete and was built from this graph."""
        found = self.path.stat().st_size
        if found != self.bytes:
            raise EngineError(
                f"{self.path} has {found} bytes, {self.bytes} were built: truncated or damaged; "
                f"copy it again or run `edgellm build {model.parent.parent}`"
            )
        if graph_sha256(model) != self.graph_sha256:
            raise EngineError(
                f"{self.path}: built from another export than {model}; "
                f"run `edgellm build {model.parent.parent}` again"
            )


def plan_path(
    model: Path, gpus: Sequence[str], library: str, version: str, version_compatible: bool = False
) -> Path:
    """Return the path of a graph's plan, named after GPUs, library and version.

    The plan of a graph that is not called `model.onnx` begins with the graph's name and a dot.
    """
    ending = COMPATIBLE if version_compatible else ""
    begin = "" if model.stem == MODEL else f"{model.stem}."
    return model.with_name(f"{begin}{'+'.join(gpus)}-{TAGS[library]}{version}{ending}.plan")


def write_plan(plan: PlanFile, contents: memoryview) -> None:
    """Write a plan and its record, each atomically.

    While they are replaced there is no record, so nothing reads a plan with another plan's record.
    """
    record = dataclasses.asdict(plan)
    del record["path"]
    _record_path(plan.path).unlink(missing_ok=True)
    write_atomically(plan.path, contents)
    write_atomically(_record_path(plan.path), json.dumps(record, indent=1).encode())


def read_plans(model: Path) -> list[PlanFile]:
    """Read the records of a graph's plans, sorted by name.

    Plans without a record are left out. EngineError for a record that is damaged.
    """
    paths = [path for path in sorted(model.parent.glob("*.plan")) if _graph_of(path.name) == model.stem]
    return [_read(path) for path in paths if _record_path(path).is_file()]


def _graph_of(plan: str) -> str:
    """Return the name of the graph that a plan was made of, from the plan's name."""
    gpus = plan.partition("-")[0]  # no name of a GPU has a dot
    return gpus.rpartition(".")[0] or MODEL


def graph_sha256(model: Path) -> str:
    """Return the SHA-256 of an ONNX file, which contains the SHA-256 of its weights."""
    return hashlib.sha256(model.read_bytes()).hexdigest()


def listed(words: Sequence[str]) -> str:
    """Join words: "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _record_path(plan: Path) -> Path:
    return plan.with_name(f"{plan.name}.json")


def _read(path: Path) -> PlanFile:
    record_path = _record_path(path)
    try:
        record = parse_json(record_path.read_bytes())
        profiles = tuple(
            Profile(
                profile["name"],
                {symbol: Range(**sizes) for symbol, sizes in profile["ranges"].items()},
                profile["lengths_vary"],
            )
            for profile in record.pop("profiles")
        )
        plan = PlanFile(path=path, profiles=profiles, gpus=tuple(record.pop("gpus")), **record)
        if plan.library not in TITLES:
            raise ValueError(f"library {plan.library!r}, expected one of {', '.join(TITLES)}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineError(
            f"{record_path}: damaged ({type(error).__name__}: {error}); "
            f"run `edgellm build {path.parent.parent}` again"
        ) from None
    return plan
