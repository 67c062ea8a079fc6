# SPDX-License-Identifier: Apache-2.0
"""What came of a run of the command `edgellm`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The last line of standard output."""
        return json.loads(self.out.splitlines()[-1])
