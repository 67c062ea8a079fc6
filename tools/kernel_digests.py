#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print the SHA-256 of the machine code of every CUDA kernel, for several shapes.

`diff` of two outputs shows which kernels a change of the sources has changed:

    python tools/kernel_digests.py > before.txt        # sm_90, as of an H200
    python tools/kernel_digests.py sm_87 > orin.txt
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from edgellm_ros.fused.cuda.compiler import compile_kernels  # noqa: E402
from edgellm_ros.fused.plan.chain import ChainPlan  # noqa: E402
from edgellm_ros.fused.plan.decoder import FusedPlan  # noqa: E402
from edgellm_ros.fused.plan.expert import ExpertPlan, ExpertTuning  # noqa: E402
from edgellm_ros.fused.plan.expert_shape import ExpertShape  # noqa: E402
from edgellm_ros.fused.plan.fusion import FusionPlan, FusionShape  # noqa: E402
from edgellm_ros.fused.plan.prefill import PrefillPlan  # noqa: E402
from edgellm_ros.fused.plan.prompt import PromptPlan  # noqa: E402
from edgellm_ros.fused.plan.prompt_mixer import PromptMixerPlan  # noqa: E402
from edgellm_ros.fused.plan.quantized import Quantized  # noqa: E402
from edgellm_ros.fused.plan.shape import FusedDraftShape, FusedShape, RecurrentShape  # noqa: E402
from edgellm_ros.fused.plan.tuning import load_tuning  # noqa: E402
from edgellm_ros.fused.plan.vision import VisionPlan, VisionShape  # noqa: E402
from edgellm_ros.kernels.cuda import compiler  # noqa: E402

MULTIPROCESSORS, SHARED_BYTES = 132, 227 << 10  # of an H100 or H200
QWEN3 = FusedShape(
    "fp16",
    layers=28,
    hidden=2048,
    heads=16,
    kv_heads=8,
    head_dim=128,
    inner=6144,
    vocab=151936,
    rotary_dim=128,
    capacity=640,
    qk_norm=True,
    tied=True,
    max_rows=16,
)
LARGE = replace(QWEN3, layers=36, hidden=4096, heads=32, inner=12288, tied=False)
QWEN2 = FusedShape(
    "bf16",
    layers=24,
    hidden=896,
    heads=14,
    kv_heads=2,
    head_dim=64,
    inner=4864,
    vocab=151936,
    rotary_dim=64,
    capacity=640,
    qkv_bias=True,
    tied=True,
    max_rows=16,
)
QWEN3_5 = FusedShape(
    "fp16",
    layers=24,
    hidden=1024,
    heads=8,
    kv_heads=2,
    head_dim=256,
    inner=3584,
    vocab=248320,
    rotary_dim=64,
    capacity=640,
    qk_norm=True,
    tied=True,
    max_rows=16,
    attention_gate=True,
    recurrent=RecurrentShape(True, 16, 16, 128, 128, 4, 128),
    attention_layers=6,
)
HEAD = FusedDraftShape(
    "fp16",
    layers=1,
    hidden=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    inner=512,
    vocab=512,
    rotary_dim=64,
    capacity=512,
    max_rows=8,
)
EXPERT = ExpertShape(
    "fp16",
    kv_caches=(0, 1),
    hidden=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    inner=512,
    rotary_dim=64,
    capacity=512,
    horizon=40,
    actions=2,
)

TOWER = VisionShape(
    "fp16",
    depth=24,
    hidden=1024,
    heads=16,
    inner=4096,
    patch=768,
    merged=4096,
    raised=4096,
    out=2048,
    deepstack=(5, 11, 17),
    epsilon=1e-6,
    merger_epsilon=1e-6,
)
TILES = replace(TOWER, patch=588, raised=2048, deepstack=(), merger_epsilon=1e-5, tile=1025)


def _quantized(shape: FusedShape, form: Quantized) -> FusedShape:
    return replace(shape, quantized=tuple((name, form) for name in ("qkv", "o", "gate_up", "down")))


def _decoders() -> Iterator[tuple[str, FusedShape, int, bool]]:
    """Yield name, shape, rows, and whether the rows have adapters."""
    for rows in (1, 2, 8, 16):
        yield "qwen3-1.7b", QWEN3, rows, False
    for rows in (1, 8):
        yield "qwen3-8b", LARGE, rows, False
        yield "qwen2-0.5b", QWEN2, rows, False
    yield "fp8 cache", replace(QWEN3, fp8_cache=True), 1, False
    yield "adapters", replace(QWEN2, lora_rank=16), 2, True
    yield "int4", _quantized(QWEN3, Quantized(4, 128)), 1, False
    yield "int4 act-order", _quantized(QWEN3, Quantized(4, 32, zero_points=True, ordered=True)), 4, False
    yield "fp8 weights", _quantized(QWEN3, Quantized(8, 0, float8=True)), 2, False
    yield "draft head", HEAD, 2, False
    yield "qwen3.5-0.8b", QWEN3_5, 1, False


def programs() -> Iterator[tuple[str, Any]]:
    """Yield the name and the plan of every program of the fused kernels."""
    limits, tuning = (MULTIPROCESSORS, SHARED_BYTES), load_tuning("sm_90")
    for name, shape, rows, adapted in _decoders():
        yield f"{name}, {rows} rows", FusedPlan(shape, rows, *limits, tuning, adapted)
    yield "chain", ChainPlan(HEAD, 8, 7, SHARED_BYTES)
    yield "prompt", PromptPlan(HEAD, SHARED_BYTES)
    for rows in (1, 8):
        yield f"fusion, {rows} rows", FusionPlan(FusionShape("fp16", 2048, 256), rows, *limits)
    for rows in (8, 32):
        yield f"expert, {rows} rows", ExpertPlan(EXPERT, rows, SHARED_BYTES, ExpertTuning())
    prompts = {"qwen3-1.7b": QWEN3, "fp8 cache": replace(QWEN3, fp8_cache=True), "qwen3.5-0.8b": QWEN3_5}
    for name, shape in prompts.items():
        yield f"{name}, prefill", PrefillPlan(shape, *limits)
    yield "qwen3.5-0.8b, mixers of prompts", PromptMixerPlan(QWEN3_5, *limits)
    yield "qwen3-1.7b, trees", PrefillPlan(QWEN3, *limits, trees=True)
    yield "qwen3-vl-2b, vision", VisionPlan(TOWER, SHARED_BYTES)
    yield "internvl3, vision", VisionPlan(TILES, SHARED_BYTES)


def machine_code(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and code of each kernel of a cubin, an ELF file of 64 bits."""
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + i * size) for i in range(count)]
    for name, _, _, _, offset, length in sections:
        start = sections[names][4] + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        if text.startswith(".text."):
            yield text.removeprefix(".text."), cubin[offset : offset + length]


def main() -> None:
    """Compile every program and print one line per kernel: digest, program, kernel."""
    arch = sys.argv[1] if len(sys.argv) > 1 else "sm_90"
    cubins = {
        "steps": compiler.compile_kernels(arch),
        "trees": compiler.compile_kernels(arch, compiler.TREE_KERNELS),
    }
    for name, cubin in cubins.items():
        _print(name, cubin)
    for name, plan in programs():
        _print(name, compile_kernels(arch, plan))


def _print(name: str, cubin: bytes) -> None:
    for kernel, code in sorted(machine_code(cubin)):
        print(f"{hashlib.sha256(code).hexdigest()}  {name}: {kernel}", flush=True)


if __name__ == "__main__":
    main()
