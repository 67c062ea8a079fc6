# SPDX-License-Identifier: Apache-2.0
"""StepConfig: sizes of the kernels of a decode step that change its time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Sizes that change the time of a step, and its results in rounding only.

    - tensor_cores: whether GEMVs run on tensor cores
    - threads, stages: per CTA of a GEMV; cp.async stages of the weights
    - slots: CTAs of GEMVs per SM at once. Every kernel has a CTA for each SM and pads its dynamic smem so
      that exactly this number fits, which spreads the CTAs of an early launch (PDL) evenly. 2: the next
      kernel loads weights while a kernel runs. Where smem is too small, it is not padded
    - registers: of a CTA of a GEMV with 2 slots, so that a CTA of the attention with up to 40K of an SM's 64K
      registers fits beside it
    - ctas_per_sm: CTAs of a GEMV per SM
    - tile, narrow_tile, head_tile: columns of a tile of `qkv` and `gate_up`, of `o` and `down`, and of an LM
      head that is not tied
    - prefetched: cp.async stages in flight before pdl_wait; None = all
    - x_in_gmem, x_in_gmem_tile: whether prepared x stays in global memory; narrow_tile of such GEMVs
    - prepares_o: whether combine_splits runs before `o`, which else combines the splits itself
    - repeated_bytes: largest number of bytes that the CTAs of a GEMV, all together, load to compute x;
      beyond it a prep kernel does. With tensor cores only; not for `o`
    - batch_attention: whether one-token steps run rope_append_kv and tree_attention, or batch_attention
    - attention_threads, attention_ctas_per_sm: per CTA of the attention; its CTAs per SM
    - batch_registers: of a CTA of batch_attention for heads of up to 128. CTAs of a GEMV and of
      combine_splits fit beside it, so `o` prefetches weights while the attention runs
    - split_rows: fewest KV rows of a split
    - quantized_tile, quantized_wide_tile, quantized_narrow_tile: columns of a tile of `qkv`, `gate_up` and
      the others, with quantised weights
    - quantized_early: cp.async stages of quantised weights issued before pdl_wait. More would delay the loads
      of x, which all CTAs wait for
    - quantized_registers: of a CTA with quantised weights and PDL
    - quantized_repeated_bytes: as repeated_bytes
    """

    tensor_cores: bool
    threads: int
    stages: int
    slots: int
    registers: int
    ctas_per_sm: int
    tile: int
    narrow_tile: int
    head_tile: int
    prefetched: int | None
    x_in_gmem: bool
    x_in_gmem_tile: int
    prepares_o: bool
    repeated_bytes: int
    batch_attention: bool
    attention_threads: int
    attention_ctas_per_sm: int
    batch_registers: int
    split_rows: int
    quantized_tile: int
    quantized_wide_tile: int
    quantized_narrow_tile: int
    quantized_early: int
    quantized_registers: int
    quantized_repeated_bytes: int
