# SPDX-License-Identifier: Apache-2.0
"""PromptMixerPlan: sizes of the kernels of recurrent mixers in a prefill."""

from __future__ import annotations

from edgellm_ros.fused.plan.launch import WARP, Launch, too_little_smem
from edgellm_ros.fused.plan.shape import FusedShape

CHUNK = 64  # tokens of a chunk
THREADS = 128  # a warp for each 16 tokens of a chunk
WARPS = THREADS // WARP
CONV_TOKENS, CONV_VALUES = 8, 128  # tokens of a warp of `convolve_tokens`; its channels, if they are values
WIDEST = 32  # columns of a head's state in a CTA of the scan, if that fills the GPU


class PromptMixerPlan:
    """Sizes that the kernels are compiled with.

    EngineError, with the reason, if they do not take the shape.
    """

    source = "prompt_mixer.cu"

    def __init__(self, shape: FusedShape, multiprocessors: int, most_shared: int) -> None:
        mixer = shape.recurrent
        assert mixer is not None
        self._shape, self._mixer = shape, mixer
        if self.smem > most_shared:
            raise too_little_smem(self.smem, most_shared)
        fits = mixer.value_dim % WIDEST == 0 and 4 * mixer.values >= 3 * WIDEST * multiprocessors
        self._columns = WIDEST if fits else 16

    @property
    def smem(self) -> int:
        """Bytes of smem of `prepare_chunks`, which are those of `ChunkTiles`."""
        mixer = self._mixer
        tiles = 2 * (mixer.key_dim // 8 + 1) + mixer.value_dim // 8 + 1
        return CHUNK * (16 * tiles + 2 * 4 * (CHUNK + 4) + 4 * 4)

    @property
    def operand_bytes(self) -> int:
        """Bytes of the operands of a head's chunk, which are those of `ChunkOperands`."""
        mixer, blocks = self._mixer, CHUNK // 16
        of_keys = (3 if mixer.delta_net else 2) * mixer.key_dim // 16
        fragments = blocks * (of_keys + blocks + mixer.value_dim // 16)
        return 16 * WARP * fragments + 4 * CHUNK

    def scratch_bytes(self, rows: int) -> dict[str, int]:
        """Return the sizes of the buffers between the kernels; rows: of all sequences."""
        mixer = self._mixer
        chunks = rows // CHUNK + self._shape.max_rows  # each sequence may end within a chunk
        return {
            "projected": 2 * rows * mixer.in_size,
            "convolved": 2 * rows * mixer.channels,
            "operands": chunks * mixer.heads * self.operand_bytes,
            "y": 4 * rows * mixer.values,
        }

    def convolve(self, batch: int, tokens: int) -> Launch:
        """Return how `convolve_tokens` is launched."""
        units = 2 * self._mixer.key_heads - (-self._mixer.values // CONV_VALUES)
        grid = -(-tokens // CONV_TOKENS) * -(-units // WARPS), batch
        return Launch("convolve_tokens", grid, THREADS)

    def prepare(self, batch: int, tokens: int) -> Launch:
        """Return how `prepare_chunks` is launched."""
        grid = -(-tokens // CHUNK) * self._mixer.heads, batch
        return Launch("prepare_chunks", grid, THREADS, self.smem)

    def scan(self, batch: int) -> Launch:
        """Return how `scan_chunks` is launched."""
        return Launch("scan_chunks", (self._mixer.values // self._columns, batch), THREADS)

    def gate(self, rows: int) -> Launch:
        """Return how `gate_tokens` is launched."""
        return Launch("gate_tokens", (-(-self._mixer.norm_groups // WARPS), rows), THREADS)

    def macros(self) -> list[tuple[str, str]]:
        """Return names and values of the macros that the kernels are compiled with."""
        values: dict[str, object] = {
            "BF16": int(self._shape.dtype == "bf16"),
            "FP8_CACHE": 0,
            "THREADS": THREADS,
            "PDL_TRIGGER_FIRST": 1,
            "MOST_REGISTERS": 0,
            "SCAN_COLUMNS": self._columns,
            "CHUNK_SMEM": self.smem,
            "CHUNK_OPERAND_BYTES": self.operand_bytes,
        }
        values |= {**self._shape.macros(), **self._mixer.macros()}
        return [(name, str(value)) for name, value in values.items()]
