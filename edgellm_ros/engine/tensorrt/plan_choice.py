# SPDX-License-Identifier: Apache-2.0
"""Choice of the plan that runs on this GPU with an installed library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensorrt.library import (
    LEAN,
    LIBRARIES,
    PACKAGES,
    Library,
    load_library,
    title_of,
    version_of,
)
from edgellm_ros.engine.tensorrt.plan_file import RTX, TENSORRT, PlanFile, listed, read_plans
from edgellm_ros.engine.tensorrt.rtx import supported_gpus


def choose_plan(model: Path, device: Device) -> tuple[Library, PlanFile]:
    """Choose the plan of a graph for a GPU, and an installed library that runs it.

    A plan of exactly a library's version is preferred, then the latest version-compatible plan of an older
    one, if the device allows the code of plans. EngineError without a library; or without such a plan: it
    lists the plans that exist, and says what makes or allows one.
    """
    plans, libraries, problems = read_plans(model), [], []
    with_code: list[PlanFile] = []  # that would run if their code were allowed
    for name in LIBRARIES:
        try:
            library = load_library(name)
        except EngineError as error:
            problems.append(str(error))
            continue
        fitting = [plan for plan in plans if device.arch in plan.gpus and _loads(library, plan)]
        if not device.allow_plan_code:
            with_code += [plan for plan in fitting if plan.version_compatible]
            fitting = [plan for plan in fitting if not plan.version_compatible]
        if fitting:
            plan = max(fitting, key=lambda plan: (version_of(plan.version), not plan.version_compatible))
            plan.check(model)
            return library, plan
        libraries.append(library)
    if not libraries:
        raise EngineError("; ".join(problems))
    if with_code:
        raise EngineError(
            f"{with_code[0].path}: a version-compatible plan contains code, which runs in this process; if "
            "you trust its origin, allow it with --allow-plan-code (node: parameter allow_plan_code)"
        )
    titles, there = listed([title_of(library) for library in libraries]), "; ".join(map(str, plans))
    raise EngineError(
        f"{model.parent}: no plan for {device.description} and {titles} (there: {there or 'none'}); "
        f"{_how_to_build(model.parent.parent, device.arch, libraries)}"
    )


def _loads(library: Library, plan: PlanFile) -> bool:
    """Whether the library's version loads plans like this one."""
    if library.__name__ == LEAN:
        made_here = plan.library == TENSORRT and plan.version_compatible
    else:
        made_here = plan.library == library.__name__
    if plan.version_compatible:
        return made_here and version_of(plan.version) <= version_of(library.__version__)
    return made_here and plan.version == library.__version__


def _how_to_build(engine_dir: Path, gpu: str, libraries: Sequence[Library]) -> str:
    """Say what makes a plan that one of these libraries loads on the GPU."""
    names = {library.__name__: library for library in libraries}
    if TENSORRT in names or (RTX in names and gpu in supported_gpus(names[RTX])):
        return f"run `edgellm build {engine_dir}` on this machine"
    if LEAN in names:
        return f"run `edgellm build {engine_dir} --version-compatible` where TensorRT and this GPU are"
    rtx = names[RTX]
    return (
        f"TensorRT for RTX {rtx.__version__} runs on {listed(supported_gpus(rtx))} only: "
        f"`pip install {PACKAGES[TENSORRT]}` and `edgellm build {engine_dir}`"
    )
