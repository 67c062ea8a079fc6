# SPDX-License-Identifier: Apache-2.0
"""FusedPlan: tiles, CTAs and smem of a decode step's kernels, for one GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.fused.plan.config import StepConfig
from edgellm_ros.fused.plan.cut import ProductCut
from edgellm_ros.fused.plan.launch import WARP, Launch
from edgellm_ros.fused.plan.product import (
    RESERVED,
    product_macros,
    ring_bytes,
    x_bytes,
)
from edgellm_ros.fused.plan.shape import MIXER_COLUMNS, SQUARED_RELU, FusedShape, RecurrentShape
from edgellm_ros.fused.plan.tuning import Tuning

# prep kernels, and the GEMV whose x each computes
PREPARED = {
    "prep_qkv": "qkv",
    "combine_splits": "o",
    "prep_gate_up": "gate_up",
    "prep_down": "down",
    "prep_in_proj": "in_proj",
    "prep_out_proj": "out_proj",
    "prep_lm_head": "lm_head",
}
OF_DRAFTS = {"joined_qkv": "qkv", "draft_head": "lm_head"}  # a draft head's kernels, and the GEMVs they run
MOST_SPLITS = 32
REGISTERS, MORE_REGISTERS = 64 << 10, 48 << 10  # of an SM; of a CTA whose `Quantized` is not plain


class FusedPlan:
    """All sizes that kernels for one shape, GPU and number of rows are compiled with.

    adapted: rows may have LoRA adapters of a rank of up to `shape.lora_rank`.
    """

    def __init__(
        self,
        shape: FusedShape,
        rows: int,
        multiprocessors: int,
        most_shared: int,
        tuning: Tuning,
        adapted: bool = False,
    ) -> None:
        self.shape, self.rows = shape, rows
        self.lora_rank = shape.lora_rank if adapted else 0
        self.config = config = tuning.config(shape, rows, adapted)
        self.mma, self._trigger_first = config.tensor_cores, tuning.trigger_first
        self._multiprocessors = multiprocessors * config.attention_ctas_per_sm
        self.shared: dict[str, int] = {}  # bytes of smem of a CTA, by kernel
        # Smaller CTAs, for GPUs with little smem.
        threads = min(128 if self.mma else 256, config.threads)
        smaller = replace(config, threads=threads, narrow_tile=min(64, config.narrow_tile))
        # With prep kernels, a CTA needs x in its own k range only.
        smallest = replace(smaller, repeated_bytes=0, quantized_repeated_bytes=0)
        if not any(self._fit(multiprocessors, most_shared, each) for each in (config, smaller, smallest)):
            raise EngineError(f"the fused kernels need more than {most_shared} bytes of shared memory")

    @property
    def source(self) -> str:
        """Name of the source in the folder `kernels`."""
        return "draft.cu" if self.shape.drafts else "decoder.cu"

    def _fit(self, multiprocessors: int, most_shared: int, config: StepConfig) -> bool:
        """Choose slots, CTAs and stages; return whether the CTAs fit into smem."""
        self.config, shape = config, self.shape
        least_stages = 3 if self.mma else 4
        for count in range(config.slots, -1, -1):
            # smem of a CTA with which `count` CTAs fit on an SM at once, but not one more
            limit = (most_shared + RESERVED) // max(1, count) - RESERVED
            least = (most_shared + RESERVED) // (count + 1) if count else 0
            # With more CTAs each has less of x in smem; with fewer stages the ring is smaller.
            factors = (1,) if count else (1, 2, 4, 8, 16, 32, 64)
            for factor in factors:
                for stages in range(config.stages, min(config.stages, least_stages if count else 2) - 1, -1):
                    self._cut(stages, multiprocessors, factor * config.ctas_per_sm)
                    static = {"o": 0 if self.prepared["o"] else self._shares_of_splits()}
                    if shape.recurrent is not None and not self.prepared["out_proj"]:
                        static["out_proj"] = 4 * self.rows * shape.recurrent.norm_groups
                    # The tied head has all of x in smem, and no kernel after it needs room on its SM.
                    most = {"lm_head": most_shared} if self.x_in_gmem and self.shape.tied else {}
                    if all(
                        nbytes + static.get(name, 0) <= most.get(name, limit)
                        for name, nbytes in self.shared.items()
                    ):
                        self.fill = multiprocessors if count else 0
                        self.shared = {name: max(least, nbytes) for name, nbytes in self.shared.items()}
                        self.shared["attention"] = least if count > 1 else 0
                        return True
        return False

    def _cut(self, stages: int, multiprocessors: int, blocks_each: int) -> None:
        shape, config, rows = self.shape, self.config, self.rows
        blocks = multiprocessors * blocks_each
        self.x_in_gmem = config.x_in_gmem and self.mma and not self.lora_rank

        def prepared(nbytes: int, name: str) -> bool:
            """Return whether a prep kernel computes x.

            nbytes: what the CTAs would read to compute x, all together.
            """
            form = shape.form(name)
            most = config.repeated_bytes if form is None else config.quantized_repeated_bytes
            return (self.mma or form is not None) and nbytes > most

        cut = ProductCut(
            shape=shape,
            config=config,
            stages=stages,
            rows=rows,
            blocks=blocks,
            mma=self.mma,
            lora_rank=self.lora_rank,
            x_in_gmem=self.x_in_gmem,
        )
        self.stages = stages
        inputs = (1 + shape.joined) * shape.hidden
        norms = 8 * rows * shape.hidden * blocks
        self.prepared = {name: prepared(norms, name) for name in ("qkv", "gate_up", "in_proj", "lm_head")}
        if shape.joined:
            self.prepared["qkv"] = False
        if shape.drafts:
            self.prepared["lm_head"] = False
        self.prepared["o"] = self._prepares_o()
        ready = self.prepared
        self.products = {
            "qkv": cut.layer("qkv", inputs, shape.qkv_size, not ready["qkv"], ready["qkv"]),
            "o": cut.layer("o", shape.q_size, shape.hidden, False, ready["o"]),
            "gate_up": cut.layer(
                "gate_up", shape.hidden, shape.gate_up_size, not ready["gate_up"], ready["gate_up"]
            ),
            "down": cut.layer("down", shape.inner, shape.hidden, False, False),
        }
        if shape.recurrent is not None:
            self._cut_mixer(shape.recurrent, cut, prepared)
        each = 4 * shape.gate_up_size // shape.inner
        sums = each * rows * self.products["down"].width * self.products["gate_up"].partials
        self.prepared["down"] = prepared(sums * self.products["down"].blocks, "down")
        if self.prepared["down"]:  # the plan above was made without the prep kernel
            self.products["down"] = cut.layer("down", shape.inner, shape.hidden, False, True)
        self.blocks = {name: plan.blocks for name, plan in self.products.items()}
        self.shared = {name: plan.shared_bytes for name, plan in self.products.items()}
        if shape.tied:
            tokens = 16 if self.mma else 1  # rows of the table per warp at once
            self.blocks["lm_head"] = min(blocks, -(-shape.vocab // tokens))
            x = x_bytes(shape.hidden, rows, True) if self.mma else 2 * -(-shape.hidden // 256) * 256 * rows
            sums = 4 * config.threads // WARP * rows
            self._head_bytes = ring_bytes(stages, config.threads, self.mma) + x + sums
        else:
            self.products["lm_head"] = plan = cut.head(self.prepared["lm_head"])
            self.blocks["lm_head"], self._head_bytes = plan.blocks, plan.shared_bytes
        self.shared["lm_head"] = self._head_bytes
        per_kv_head = shape.heads // shape.kv_heads
        self.groups = -(-per_kv_head // 4)
        wanted = multiprocessors * config.attention_ctas_per_sm // (shape.kv_heads * self.groups)
        self.splits = max(1, min(MOST_SPLITS, wanted, -(-shape.capacity // config.split_rows)))

    def _cut_mixer(
        self,
        mixer: RecurrentShape,
        cut: ProductCut,
        prepared: Callable[[int, str], bool],
    ) -> None:
        """Cut the GEMVs of a recurrent mixer; prepared: as in `_cut`."""
        hidden, ready = self.shape.hidden, not self.prepared["in_proj"]
        self.prepared["out_proj"] = False
        self.products["in_proj"] = cut.layer("in_proj", hidden, mixer.in_size, ready, not ready)
        out = cut.layer("out_proj", mixer.values, hidden, False, False)
        values = 4 * self.rows * (out.width + mixer.values // MIXER_COLUMNS)
        self.prepared["out_proj"] = prepared(values * out.blocks, "out_proj")
        if self.prepared["out_proj"]:  # the plan above was made without the prep kernel
            out = cut.layer("out_proj", mixer.values, hidden, False, True)
        self.products["out_proj"] = out

    def _prepares_o(self) -> bool:
        """Return whether combine_splits computes x of `o`.

        CTAs that combine splits wait for several loads one after another, however few bytes they load.
        """
        form, wanted = self.shape.form("o"), self.config.prepares_o
        return self.shape.attention_gate or (wanted and self.mma if form is None else wanted or form.ordered)

    def _shares_of_splits(self) -> int:
        """Return the bytes of static smem of the kernel `o`: weights of the splits."""
        heads = min(self.shape.heads, self.products["o"].width // self.shape.head_dim + 3)
        return 4 * self.rows * heads * self.splits

    def makes_new_rows(self, tokens: int) -> bool:
        """Whether rope_append_kv and tree_attention, or batch_attention, are run."""
        return tokens > 1 or (self.config.batch_attention and self.rows > 1)

    def attends_in_batch(self, tokens: int) -> bool:
        """Whether batch_attention replaces rope_append_kv and tree_attention.

        One warp per head. Overlaps with the next GEMV (PDL) only at one CTA per SM with registers to spare.
        """
        heads = self.shape.heads // self.shape.kv_heads + 2
        room = heads * WARP <= self.config.attention_threads
        beside = self.config.slots < 2 and not self.shape.quantized and not self.lora_rank
        return tokens == 1 and self.makes_new_rows(1) and beside and room

    def tree_splits(self, rows: int, tokens: int) -> int:
        """Return the number of KV splits of tree_attention: its CTAs fill the GPU once."""
        blocks = self.shape.kv_heads * self._query_tiles(tokens) * (rows // tokens)
        return max(1, min(self.splits, self._multiprocessors // blocks))

    def _query_tiles(self, tokens: int) -> int:
        """Return the number of CTAs of tree_attention that share a KV head's queries."""
        queries = 16 if self.shape.head_dim <= 128 else 8
        return -(-tokens * self.shape.heads // self.shape.kv_heads // queries)

    def has(self, name: str) -> bool:
        """Return whether a step has this kernel: a prep kernel only if it is needed."""
        return name not in PREPARED or self.prepared[PREPARED[name]]

    def launch(self, name: str, rows: int, early: bool, tokens: int = 1) -> Launch:
        """Return the launch of a kernel for `rows` rows, `tokens` of each sequence."""
        config, shape = self.config, self.shape
        if name == "mix":
            assert shape.recurrent is not None
            warps = shape.recurrent.warps
            grid = shape.recurrent.values // (MIXER_COLUMNS * warps), rows // tokens
            return Launch(name, grid, WARP * warps, 0, early)
        if name in ("tree_attention", "batch_attention"):
            blocks = shape.kv_heads * self._query_tiles(tokens) * self.tree_splits(rows, tokens)
            return Launch(name, (blocks, rows // tokens), config.attention_threads, 0, early)
        if name == "rope_append_kv":
            heads = shape.heads + 2 * shape.kv_heads
            grid = -(-heads * WARP // config.attention_threads), rows
            return Launch(name, grid, config.attention_threads, 0, early)
        if name == "last_state":
            blocks = -(-rows * shape.hidden // (2 * config.threads))
            return Launch(name, (blocks, 1), config.threads, 0, early)
        if name in PREPARED:
            of_a_block = {
                "prep_down": 4 * config.threads,
                "combine_splits": config.threads // WARP * shape.head_dim,
            }
            if name == "prep_out_proj":
                assert shape.recurrent is not None
                return Launch(name, (shape.recurrent.norm_groups, rows), config.threads, 0, early)
            size = {"prep_down": shape.inner, "combine_splits": shape.q_size}
            grid = (-(-size[name] // of_a_block[name]), rows) if name in size else (rows, 1)
            return Launch(name, grid, config.threads, 0, early)
        name, kernel = OF_DRAFTS.get(name, name), name
        shared = self.shared[name]
        if name == "attention":
            blocks = self.shape.kv_heads * self.groups * self.splits
            grid = max(blocks, self.fill if rows == 1 else 0), rows
            return Launch(kernel, grid, config.attention_threads, shared, early)
        return Launch(kernel, (max(self.fill, self.blocks[name]), 1), config.threads, shared, early)

    def scratch_bytes(self) -> dict[str, int]:
        """Return the sizes of the buffers between the kernels."""
        shape, rows, mixer = self.shape, self.rows, self.shape.recurrent
        values = 0 if mixer is None else mixer.values
        recurrent = {}
        if mixer is not None:
            recurrent = {
                "in_proj": 4 * self.products["in_proj"].partials * rows * mixer.in_size,
                "mixed": 4 * rows * values,
                "squares": 4 * rows * values // MIXER_COLUMNS,
            }
        return {
            **recurrent,
            "residual": 8 * rows * shape.hidden,
            "qkv": 4 * self.products["qkv"].partials * rows * shape.qkv_size,
            "gate_up": 4 * self.products["gate_up"].partials * rows * shape.gate_up_size,
            "x": x_bytes(max(shape.hidden, shape.inner, shape.q_size, values), rows, self.mma),
            "queries": 2 * rows * shape.q_size,
            "split_sums": 4 * rows * self.splits * shape.q_size,
            "split_scales": 8 * rows * self.splits * shape.heads,
        }

    def macros(self) -> list[tuple[str, str]]:
        """Return names and values of the macros that the kernels are compiled with."""
        shape, config = self.shape, self.config
        registers = 0 if config.slots < 2 or self.lora_rank else config.registers  # 0: no limit
        early_registers = config.quantized_registers
        forms = shape.forms()
        if any(not form.plain for _, form in forms):
            early_registers = max(early_registers, MORE_REGISTERS)
        if not forms or self.lora_rank:
            early_registers = 0
        batch_registers = config.batch_registers if shape.head_dim <= 128 else REGISTERS
        values: dict[str, object] = {
            "BF16": int(shape.dtype == "bf16"),
            "FP8_CACHE": int(shape.fp8_cache),
            "ROWS": self.rows,
            "TENSOR_CORES": int(self.mma),
            "LORA_RANK": self.lora_rank,
            "THREADS": config.threads,
            "STAGES": self.stages,
            "PREFETCH_STEPS": self.stages if config.prefetched is None else config.prefetched,
            "QUANTIZED_EARLY": config.quantized_early,
            "PDL_TRIGGER_FIRST": int(self._trigger_first),
            "MOST_REGISTERS": registers // config.threads,
            "EARLY_REGISTERS": min(255, early_registers // config.threads),
            "ATTENTION_THREADS": config.attention_threads,
            "ATTENDS_BY_ROW": int(not self.makes_new_rows(1)),
            "ATTENDS_IN_BATCH": int(self.attends_in_batch(1)),
            "BATCH_REGISTERS": min(255, batch_registers // config.attention_threads),
            "SPLITS": self.splits,
            "SPLIT_ROWS": config.split_rows,
            "HIDDEN": shape.hidden,
            "JOINED": int(shape.joined),
            "DRAFTS": int(shape.drafts),
            "HEADS": shape.heads,
            "KV_HEADS": shape.kv_heads,
            "HEAD_DIM": shape.head_dim,
            "INNER": shape.inner,
            "VOCAB": shape.vocab,
            "HEAD_COLUMNS": shape.all_head_columns,
            "ROTARY_DIM": shape.rotary_dim,
            "CAPACITY": shape.capacity,
            "QK_NORM": int(shape.qk_norm),
            "QKV_BIAS": int(shape.qkv_bias),
            "MLP_BIAS": int(shape.mlp_bias),
            "TIED": int(shape.tied),
            "LM_HEAD_BLOCKS": self.blocks["lm_head"],
            "LM_HEAD_SMEM": self._head_bytes,
            "SQUARED_RELU": int(shape.activation == SQUARED_RELU),
            "MIXER": 0,
        }
        values |= shape.macros()
        if shape.recurrent is not None:
            values |= shape.recurrent.macros()
        values |= {f"{name.upper()}_PREPARED": int(prepared) for name, prepared in self.prepared.items()}
        for name, plan in self.products.items():
            values |= product_macros(name.upper(), plan)
        return [(name, str(value)) for name, value in values.items()]
