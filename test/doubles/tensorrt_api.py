# SPDX-License-Identifier: Apache-2.0
"""The interface of NVIDIA's real Python bindings, read from the wheel `tensorrt-cu13-bindings`.

The bindings import once libraries with the names and symbols they ask for can be loaded. Stubs whose
functions return null are enough for that: nothing can be run with them, but every class, enum and signature
is there.

As a program: `python tensorrt_api.py` prints the interface as JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BINDINGS = "tensorrt_bindings"
SIGNATURE = r"\w+\((.*)\) -> (.*)"
SYSTEM_SYMBOLS = ("Py", "_Py", "dl", "_", "pthread")


@dataclass(frozen=True)
class Parameter:
    """Of a signature; `type` as pybind11 writes it, without module names."""

    name: str
    type: str
    optional: bool


@dataclass(frozen=True)
class Signature:
    parameters: tuple[Parameter, ...]  # without self
    returns: str


class Api:
    """Classes of the bindings, and what each has: a method's signatures, a property's type, or "value"."""

    def __init__(self, classes: dict[str, dict[str, Any]], names: list[str]) -> None:
        self.names = set(names)
        self.classes = {
            name: {member: _member(content) for member, content in members.items()}
            for name, members in classes.items()
        }


def read_api(folder: Path) -> Api:
    """Build stubs in the folder and read the interface in another process."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(build_stubs(folder))}
    output = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    return Api(**json.loads(output))


def build_stubs(folder: Path) -> Path:
    """Libraries that let the bindings import, made with gcc; their folder."""
    extension = Path(find_spec(BINDINGS).submodule_search_locations[0]) / "tensorrt.so"
    needed = _output("readelf", "--dynamic", "--wide", extension)
    undefined = _output("nm", "--dynamic", "--undefined-only", extension)
    symbols = [
        symbol
        for symbol in re.findall(r"^\s+U (\w+)$", undefined, re.MULTILINE)
        if not symbol.startswith(SYSTEM_SYMBOLS)
    ]
    source = folder / "stub.c"
    source.write_text("".join(f"void *{symbol}(void) {{ return 0; }}\n" for symbol in symbols))
    for library in re.findall(r"\[(libnv\w+\.so[.\d]*)\]", needed):
        _output("gcc", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", folder / library, source)
    return folder


def _output(*command: object) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout


def _member(content: Any) -> Any:
    if isinstance(content, str):
        return _short(content)
    return [_signature(line) for line in content if re.fullmatch(SIGNATURE, line)]


def _signature(line: str) -> Signature:
    """Parse "name(self: a.B, x: typing.SupportsInt = 3) -> bool"."""
    inside, returns = re.fullmatch(SIGNATURE, line).groups()
    parameters = []
    for text in _split(inside):
        name, _, kind = text.partition(": ")
        kind, default, _ = kind.partition(" = ")
        if name != "self":
            parameters.append(Parameter(name, _short(kind), bool(default)))
    return Signature(tuple(parameters), _short(returns))


def _split(text: str) -> list[str]:
    """At the commas outside of all brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _short(kind: str) -> str:
    return re.sub(r"(\w+\.)+|nvonnxparser::I?", "", kind)  # C++ names where a class was registered late


def _describe(member: Any) -> Any:
    """A method's signatures and a property's type, as written in docstrings; "value" for all else."""
    if isinstance(member, property):
        return (getattr(member.fget, "__doc__", None) or "").strip().rpartition(" -> ")[2] or "value"
    lines = (getattr(member, "__doc__", None) or "").splitlines()
    if not callable(member) or isinstance(member, type) or not lines or "(" not in lines[0]:
        return "value"
    if lines[0].endswith("(*args, **kwargs)"):
        return [re.sub(r"^\d+\. ", "", line) for line in lines if re.match(r"\d+\. \w+\(", line)]
    return [lines[0]]


def main() -> None:
    import tensorrt_bindings

    classes = {
        name: {member: _describe(getattr(value, member)) for member in dir(value)}
        for name, value in vars(tensorrt_bindings).items()
        if isinstance(value, type)
    }
    for name in list(classes):  # enums in classes
        for member in [key for key in classes[name] if not key.startswith("_")]:
            value = getattr(getattr(tensorrt_bindings, name), member)
            if isinstance(value, type):
                classes[f"{name}.{member}"] = {key: _describe(getattr(value, key)) for key in dir(value)}
    print(json.dumps({"classes": classes, "names": dir(tensorrt_bindings)}))


if __name__ == "__main__":
    main()
