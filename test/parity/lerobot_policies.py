# SPDX-License-Identifier: Apache-2.0
"""Imports LeRobot's policies from an installation without their dependencies.

The installation is apart from this package. What no policy needs for actions is replaced by empty modules.

LeRobot 0.5 and 0.6 are written for Python 3.12, but only the syntax of two generic declarations is. On
Python 3.11 these lines are read as the older Python writes them.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.empty_modules import UNRELATED, EmptyModules, add_policies_of_lerobot

INSTALLED = Path(sys.prefix) / "lerobot"  # LeRobot 0.4.4, and what all versions import
NEWER = ("0.5.1", "0.6.1")
SEARCHED = [INSTALLED]  # folders to import from, in this order
# a generic class or function of Python 3.12 -> as Python 3.11 writes it
OLDER_SYNTAX = (
    (r"^class (\w+)\[(.+)\]\((\w+)\):$", r"class \1(\3, __import__('typing').Generic[\2]):"),
    (r"^def (\w+)\[(\w+): .+?\]\(", r"\2 = __import__('typing').TypeVar('\2')\ndef \1("),
)


class _OlderSyntax(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data, path, *, _optimize=-1):
        text = data.decode()
        for pattern, replacement in OLDER_SYNTAX:
            text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
        return super().source_to_code(text.encode(), path, _optimize=_optimize)


class _ModulesOfLeRobot(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if not name.startswith("lerobot."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _OlderSyntax(name, spec.origin)
        return spec


def use(version: str) -> None:
    """Import from the installation of a newer version.

    To be called before LeRobot is imported.
    """
    SEARCHED.insert(0, installed(version))


def installed(version: str) -> Path:
    """Return the folder in which `make parity` installs a newer version."""
    return Path(sys.prefix) / f"lerobot-{version}"


def run(version: str, program: str, *arguments: str) -> None:
    """Run a program of this folder that imports a newer version.

    Two versions cannot be imported in one process. The test is skipped if the version is not installed.
    """
    if sys.version_info < (3, 11):
        pytest.skip("LeRobot since 0.5 needs Python 3.11 or newer")
    if not installed(version).is_dir():
        pytest.skip(f"{installed(version)} has no LeRobot: make parity installs it")
    command = [sys.executable, str(Path(__file__).with_name(program)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@contextmanager
def importable(unrelated: tuple[str, ...] = ()) -> Iterator[None]:
    """Let modules of LeRobot be imported.

    Those of UNRELATED and `unrelated` are empty.
    """
    finders = [
        EmptyModules((*UNRELATED, *unrelated)),
        *([_ModulesOfLeRobot()] if sys.version_info < (3, 12) else []),
    ]
    sys.meta_path[:0] = finders
    sys.path[:0] = [str(folder) for folder in SEARCHED]
    try:
        add_policies_of_lerobot()
        yield
    finally:
        for folder in SEARCHED:
            sys.path.remove(str(folder))
        for finder in finders:
            sys.meta_path.remove(finder)
        packages = ("datasets", "diffusers", "imageio", "torchvision")
        for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
            del sys.modules[name]  # others ask whether these packages are there


def _import(folder: str, names: tuple[str, ...]) -> tuple[types.ModuleType, ...]:
    """Import modules of a policy's folder.

    The test is skipped if LeRobot is not installed.
    """
    if not INSTALLED.is_dir():
        pytest.skip(f"{INSTALLED} has no LeRobot: make parity installs it")
    if f"{folder}.{names[-1]}" not in sys.modules:
        with importable():
            return tuple(importlib.import_module(f"{folder}.{name}") for name in names)
    return tuple(sys.modules[f"{folder}.{name}"] for name in names)


def smolvla() -> tuple[types.ModuleType, ...]:
    """Import three modules of LeRobot's SmolVLA.

    The modules are `modeling_smolvla`, `smolvlm_with_expert` and `processor_smolvla`.
    """
    return _import(
        "lerobot.policies.smolvla", ("modeling_smolvla", "smolvlm_with_expert", "processor_smolvla")
    )


def diffusion() -> tuple[types.ModuleType, ...]:
    """Import `modeling_diffusion` and `processor_diffusion` of Diffusion Policy."""
    return _import("lerobot.policies.diffusion", ("modeling_diffusion", "processor_diffusion"))


def act() -> tuple[types.ModuleType, ...]:
    """Import the modules `modeling_act` and `processor_act` of LeRobot's ACT."""
    return _import("lerobot.policies.act", ("modeling_act", "processor_act"))


def xvla() -> tuple[types.ModuleType, ...]:
    """Import the modules `modeling_xvla` and `processor_xvla` of LeRobot's X-VLA."""
    return _import("lerobot.policies.xvla", ("modeling_xvla", "processor_xvla"))


def arm_training() -> types.SimpleNamespace:
    """Import the modules of `training.arm` by their names; `main` is its command."""
    names = ("act", "folder", "kind", "score", "smolvla", "__main__")
    *modules, main = _import("training.arm", names)
    return types.SimpleNamespace(**dict(zip(names[:-1], modules, strict=True)), main=main)


def pi(kind: str) -> tuple[types.ModuleType, ...]:
    """Import three modules of LeRobot's pi0 or pi0.5 ("pi05").

    The modules are `configuration_*`, `modeling_*` and `processor_*`. The model itself needs changes to
    transformers.
    """
    names = tuple(f"{name}_{kind}" for name in ("configuration", "modeling", "processor"))
    return _import(f"lerobot.policies.{kind}", names)
