#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print the SHA-256 of every file of the engines of the tests' checkpoints.

`diff` of two outputs shows which graphs and weights a change of the exporter has changed:

    python tools/engine_digests.py > before.txt
"""

from __future__ import annotations

import hashlib
import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]

from edgellm_ros.builder.exporter.export import export  # noqa: E402
from fixtures.export_checkpoints import CHECKPOINTS  # noqa: E402
from fixtures.quantized_checkpoint import METHODS  # noqa: E402
from fixtures.vision_families import VISION_FAMILIES  # noqa: E402

Case = tuple[str, dict[str, Any]]  # name of a checkpoint, options of `export`
PRECISIONS: list[dict[str, Any]] = [{"precision": name} for name in ("fp32", "fp16", "bf16")]
INT4 = {"quantize": "int4", "group_size": 32}


def _cases() -> Iterator[Case]:
    for options in (*PRECISIONS, {**INT4, "precision": "fp16"}, {"cpu_int8": True}, {"kv_cache": "fp8"}):
        draft = {"with_draft": "kv_cache" not in options}
        yield "arena", {**draft, **options}
    for options in (*PRECISIONS, INT4, {"lm_head_input": True, "hidden_state_layers": (1, 2)}):
        yield "tiny", options
    for options in PRECISIONS[:2]:
        for name in ("tiny with adapter", "tiny with head", "smolvla"):
            yield name, options
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        for options in (*PRECISIONS[:2], INT4):
            yield family, options
    for name in (*VISION_FAMILIES, "nemotron_h", "qwen3_5 text"):
        for options in PRECISIONS[:2]:
            yield name, options
    for family in ("qwen3_vl", "qwen2_5_vl"):
        yield f"{family} videos", {}
    for method in METHODS:
        for options in PRECISIONS[:2]:
            yield method, options


def main() -> None:
    """Export every case and print one line per file: digest, case, options, path."""
    logging.disable(logging.WARNING)
    for name, options in _cases():
        with tempfile.TemporaryDirectory() as folder:
            engine = Path(folder) / "engine"
            export(CHECKPOINTS[name](Path(folder) / "checkpoint"), engine, **options)
            words = ", ".join(f"{key}={value}" for key, value in options.items())
            for path in sorted(path for path in engine.rglob("*") if path.is_file()):
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                print(f"{digest}  {name} ({words}): {path.relative_to(engine)}", flush=True)


if __name__ == "__main__":
    main()
