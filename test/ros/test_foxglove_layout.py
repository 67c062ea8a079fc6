# SPDX-License-Identifier: Apache-2.0
"""The Foxglove layout: complete, with the settings of its panels.

test_views.py tests its topics and those of RViz.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LAYOUT = json.loads((Path(__file__).parents[2] / "views" / "edgellm.foxglove.json").read_text())
PANELS = LAYOUT["configById"]
TITLE = "foxglovePanelTitle"  # the app's, beside the panel's own settings


class TestLayout:
    def test_every_panel_has_one_place(self):
        def leaves(node: Any) -> Iterator[str]:
            if isinstance(node, str):
                yield node
            else:
                assert node["direction"] in ("row", "column")
                assert 0 < node["splitPercentage"] < 100
                yield from leaves(node["first"])
                yield from leaves(node["second"])

        assert sorted(leaves(LAYOUT["layout"])) == sorted(PANELS)

    def test_settings_are_those_of_foxgloves_sdk(self):
        sdk = pytest.importorskip("foxglove.layouts")
        kinds = {
            "3D": sdk.ThreeDeeConfig,
            "Image": sdk.ImageConfig,
            "Plot": sdk.PlotConfig,
            "RawMessages": sdk.RawMessagesConfig,
            "DiagnosticSummary": sdk.DiagnosticsSummaryConfig,
            "Publish": sdk.PublishConfig,
            "CallService": sdk.ServiceCallConfig,
        }
        for panel, settings in PANELS.items():
            given = {name: value for name, value in settings.items() if name != TITLE}
            assert problem(given, kinds[panel.split("!")[0]], panel) == ""


def problem(value: Any, kind: Any, where: str) -> str:
    """Return why a value of the layout is not of the SDK's type; empty if it is."""
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    wrong = f"{where}: {value!r} is not {kind}"
    if origin in (types.UnionType, typing.Union):
        reasons = [problem(value, option, where) for option in arguments]
        return "" if "" in reasons else max(reasons, key=len)
    if origin is typing.Literal:
        return "" if value in arguments else wrong
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        # the SDK writes layerId itself
        hints = {camel(name): hint for name, hint in typing.get_type_hints(kind).items()} | {"layerId": str}
        parts = [(value[name], hints.get(name), f"{where}.{name}") for name in value]
        if any(hint is None for _, hint, _ in parts):
            return f"{where} has no {sorted(value.keys() - hints.keys())}"
    elif origin is dict and isinstance(value, dict):
        parts = [(value[name], arguments[1], f"{where}.{name}") for name in value]
    elif origin is list and isinstance(value, list):
        parts = [(item, arguments[0], f"{where}[{index}]") for index, item in enumerate(value)]
    elif origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        parts = [(item, arguments[index], f"{where}[{index}]") for index, item in enumerate(value)]
    elif kind in (bool, str, float, int):
        right = type(value) in ((int, float) if kind is float else (kind,))
        return "" if right else wrong
    else:
        return wrong
    return next(filter(None, (problem(*part) for part in parts)), "")


def camel(name: str) -> str:
    return re.sub("_(.)", lambda match: match[1].upper(), name)
