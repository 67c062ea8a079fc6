# SPDX-License-Identifier: Apache-2.0
"""The interface of NVIDIA's Python bindings, read from the stubs in `typings`.

`make lint` generates the stubs.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

TYPINGS = Path(__file__).parents[2] / "typings"
STUBS = {module: TYPINGS / module / "__init__.pyi" for module in ("tensorrt", "tensorrt_rtx")}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a signature; `type` without module names."""

    name: str
    type: str
    optional: bool


@dataclass(frozen=True)
class Signature:
    parameters: tuple[Parameter, ...]  # without self


Member = list[Signature] | str  # a method's signatures, or the type of anything else


def read_api(stubs: Path) -> dict[str, dict[str, Member]]:
    """Return the members of each class and its bases.

    Nested classes are "Outer.Inner".
    """
    classes: dict[str, dict[str, Member]] = {}
    _read(ast.parse(stubs.read_text()).body, "", classes)
    return classes


def _read(body: list[ast.stmt], prefix: str, classes: dict[str, dict[str, Member]]) -> None:
    for node in body:
        if not isinstance(node, ast.ClassDef):
            continue
        members: dict[str, Member] = {}
        for base in node.bases:
            members |= classes.get(ast.unparse(base), {})
        own: dict[str, Member] = {}
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign):
                own[ast.unparse(statement.target)] = _short(ast.unparse(statement.annotation))
            elif isinstance(statement, ast.FunctionDef):
                _add(own, statement)
            elif isinstance(statement, ast.ClassDef):
                own[statement.name] = "type"
        classes[prefix + node.name] = members | own
        _read(node.body, f"{prefix}{node.name}.", classes)


def _add(members: dict[str, Member], function: ast.FunctionDef) -> None:
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    if "property" in decorators:
        members[function.name] = _short(ast.unparse(function.returns)) if function.returns else "value"
    elif not any(name.endswith(".setter") for name in decorators):
        signatures = members.setdefault(function.name, [])
        if function.args.vararg is None:  # *args have no types
            signatures.append(_signature(function.args))


def _signature(arguments: ast.arguments) -> Signature:
    given = [argument for argument in (*arguments.posonlyargs, *arguments.args) if argument.arg != "self"]
    required = len(given) - len(arguments.defaults)
    return Signature(
        tuple(
            Parameter(a.arg, _short(ast.unparse(a.annotation)) if a.annotation else "", i >= required)
            for i, a in enumerate(given)
        )
    )


def _short(kind: str) -> str:
    return re.sub(r"(\w+\.)+(?=\w)", "", kind).removesuffix(" | tuple[int, ...]")
