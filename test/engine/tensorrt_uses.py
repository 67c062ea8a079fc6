# SPDX-License-Identifier: Apache-2.0
"""What our code uses of TensorRT, found in its syntax tree, and whether the real interface has it.

Types are followed from the names `trt` and `library` (the module) through calls, assignments, `self`
attributes, loops and annotations; the modules are written so that this is enough. `uses` says what was found,
`problems` what the real interface does not have.
"""

from __future__ import annotations

import ast

from doubles.tensorrt_api import Api, Signature

MODULE = "module"
LITERALS = {int: "SupportsInt", str: "str", bool: "bool", bytes: "Buffer"}


class Uses(ast.NodeVisitor):
    """Reads one module's source. Types are the names of classes, "list[X]", "type[X]" or MODULE."""

    def __init__(self, source: str, api: Api) -> None:
        self.uses: set[str] = set()
        self.problems: list[str] = []
        self._api = api
        self._names: dict[str, str | None] = {"trt": MODULE, "library": MODULE}
        self._attributes: dict[str, str | None] = {}  # of self
        self._returns: dict[str, str | None] = {}  # of our functions and methods
        self._seen: dict[int, str | None] = {}
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                self._returns[node.name] = self._annotation(node.returns)
        for _ in range(2):  # attributes of self may be read above the place where they are set
            self._seen.clear()
            self.problems.clear()
            self.visit(tree)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside = dict(self._names)
        for argument in (*node.args.args, *node.args.kwonlyargs):
            if argument.arg not in ("trt", "library"):
                self._names[argument.arg] = self._annotation(argument.annotation)
        for statement in node.body:
            self.visit(statement)
        self._names = outside

    def visit_Assign(self, node: ast.Assign) -> None:
        kind = self.type_of(node.value)
        for target in node.targets:
            self._assign(target, node.value, kind)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign(node.target, node.value, self.type_of(node.value))

    def visit_For(self, node: ast.For) -> None:
        self._assign(node.target, None, _element(self.type_of(node.iter)))
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._assign(node.target, None, _element(self.type_of(node.iter)))
        for condition in node.ifs:
            self.type_of(condition)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr):
            self.type_of(node)
        else:
            super().generic_visit(node)

    def type_of(self, node: ast.expr | None) -> str | None:
        """The TensorRT type of an expression, None if it has none; notes the uses in it."""
        if node is None:
            return None
        if id(node) not in self._seen:
            self._seen[id(node)] = self._find(node)
        return self._seen[id(node)]

    def _find(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            for generator in node.generators:
                self.visit(generator)
            for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
                element = self.type_of(part)
            return f"list[{element}]" if element else None
        for child in ast.iter_child_nodes(node):
            self.visit(child)
        if isinstance(node, ast.Constant):
            return LITERALS.get(type(node.value))
        return None

    def _attribute(self, node: ast.Attribute) -> str | None:
        owner = self.type_of(node.value)
        if isinstance(node.value, ast.Name) and node.value.id == "self" and owner is None:
            return self._attributes.get(node.attr)
        if owner == MODULE:
            return self._of_module(node)
        name = owner.removeprefix("type[").removesuffix("]") if owner else ""
        if name not in self._api.classes:
            return None
        self._note(node, f"{name}.{node.attr}", node.attr in self._api.classes[name])
        if f"{name}.{node.attr}" in self._api.classes:
            return f"type[{name}.{node.attr}]"
        kind = self._api.classes[name].get(node.attr)
        return kind if isinstance(kind, str) and kind in self._api.classes else None

    def _of_module(self, node: ast.Attribute) -> str | None:
        if node.attr != "__name__":  # every module has it
            self._note(node, node.attr, node.attr in self._api.names)
        return f"type[{node.attr}]" if node.attr in self._api.classes else None

    def _call(self, node: ast.Call) -> str | None:
        given = [self.type_of(argument) for argument in node.args]
        keywords = {keyword.arg: self.type_of(keyword.value) for keyword in node.keywords}
        function = node.func
        called = self.type_of(function)
        if isinstance(function, ast.Name) and function.id == "start":  # start(trt, trt.Runtime)
            called = given[1]
            given = ["ILogger"]
        if called and called.startswith("type["):
            name = called[5:-1]
            self._check(node, f"{name}.__init__", self._api.classes[name].get("__init__"), given, keywords)
            return name
        if isinstance(function, ast.Attribute):
            owner = (self.type_of(function.value) or "").removeprefix("type[").removesuffix("]")
            members = self._api.classes.get(owner, {})
            if function.attr in members:
                if (self.type_of(function.value) or "").startswith("type["):
                    given = given[1:]  # Class.method(self, ...)
                return self._check(node, f"{owner}.{function.attr}", members[function.attr], given, keywords)
            return self._returns.get(function.attr)
        return self._returns.get(function.id) if isinstance(function, ast.Name) else None

    def _check(
        self,
        node: ast.Call,
        name: str,
        signatures: list[Signature] | str | None,
        given: list[str | None],
        keywords: dict[str | None, str | None],
    ) -> str | None:
        """What a call returns; a problem if no signature takes these arguments."""
        for signature in signatures if isinstance(signatures, list) else []:
            if _takes(signature, given, keywords):
                returned = signature.returns
                return returned if _element(returned) or returned in self._api.classes else None
        self.problems.append(f"line {node.lineno}: {name} does not take {ast.unparse(node)}")
        return None

    def _assign(self, target: ast.expr, value: ast.expr | None, kind: str | None) -> None:
        if isinstance(target, ast.Name):
            if target.id not in ("trt", "library"):
                self._names[target.id] = kind
        elif isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple) else [None] * len(target.elts)
            for part, source in zip(target.elts, parts, strict=False):
                self._assign(part, source, self.type_of(source) if source else _element(kind))
        elif isinstance(target, ast.Attribute):
            owner = self.type_of(target)  # notes a use if it is TensorRT's
            if isinstance(target.value, ast.Name) and target.value.id == "self" and owner is None:
                self._attributes[target.attr] = kind
        else:
            self.visit(target)

    def _annotation(self, node: ast.expr | None) -> str | None:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "trt":
            self._of_module(node)
            return node.attr
        return MODULE if isinstance(node, ast.Name) and node.id == "trt" else None

    def _note(self, node: ast.Attribute, name: str, exists: bool) -> None:
        self.uses.add(name)
        if not exists:
            self.problems.append(f"line {node.lineno}: there is no {name}")


def _element(kind: str | None) -> str | None:
    return kind[5:-1] if kind and kind.startswith("list[") else None


def _takes(signature: Signature, given: list[str | None], keywords: dict[str | None, str | None]) -> bool:
    parameters = signature.parameters
    if len(given) > len(parameters):
        return False
    names = [parameter.name for parameter in parameters]
    if any(keyword not in names[len(given) :] for keyword in keywords):
        return False
    if any(not p.optional and p.name not in keywords for p in parameters[len(given) :]):
        return False
    kinds = [*zip(parameters, given, strict=False)]
    kinds += [(parameters[names.index(name)], kind) for name, kind in keywords.items()]
    return all(kind is None or _fits(kind, parameter.type) for parameter, kind in kinds)


def _fits(kind: str, wanted: str) -> bool:
    """Whether an argument of a known type is what a parameter wants; a class's subclasses are not known."""
    if wanted == "ILogger":
        return kind not in LITERALS.values()
    return kind == wanted or (kind, wanted) == ("SupportsInt", "bool") or wanted == "object"
