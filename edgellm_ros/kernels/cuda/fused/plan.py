# SPDX-License-Identifier: Apache-2.0
"""FusedPlan: how the products of a decode step are cut into tiles and shares.

A plan is for one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.kernels.cuda.fused.quantized import Quantized
from edgellm_ros.kernels.cuda.fused.shape import FusedShape

FILES = (
    "gemv.cuh", "quantized.cuh", "lora.cuh", "norm.cuh", "table.cuh", "plans.cuh", "attention.cuh",
    "tree_attention.cuh", "decoder.cu",
)  # fmt: skip
DRAFT_FILES = (*FILES, "draft.cu")
OF_DRAFTS = {"joined_qkv": "qkv", "draft_head": "lm_head"}  # kernels with the same products
WARP = 32
COPY = 16  # bytes of one asynchronous copy: 8 values
# With tensor cores: copies of a thread per step; rows of a warp's sums, and their columns with a gap.
COPIES, SUMS_ROWS, SUMS_STRIDE = 4, 8, 68
MOST_SPLITS = 32
COLUMNS = 16  # of a warp that multiplies quantised weights
PIECES = 8  # copies of one such column in a step of a warp
OTHER_MMA_ROWS = 4  # as `mma_rows`, with quantised weights and with adapters
MOST_WIDE_ROWS = 8  # with quantised weights, of blocks with as many threads as those of one row
FEWEST_STEPS = 3  # of quantised weights on their way
REGISTERS, MORE_REGISTERS = 64 << 10, 48 << 10  # of a multiprocessor, of blocks that need more than others
RESERVED = 1 << 10  # bytes of shared memory that a block has besides its own


@dataclass(frozen=True)
class FusedTuning:
    """Sizes that change the time of a step, and its results in rounding only.

    - tile, narrow_tile: columns of a tile of products with 2 or 3 parts, and of those with the hidden size as
      columns
    - quantized_tile, quantized_wide_tile, quantized_narrow_tile: of queries, keys and values, of gate and
      up, and of the others, with quantised weights
    - registers: those of a block of a product if two have room at once; a block of the attention, which has
      up to 40K of a multiprocessor's 64K, has room beside it
    - quantized_threads, quantized_stages: threads and stages of kernels of up to eight rows for a shape with
      quantised weights
    - quantized_slots: slots of those of up to three rows, without tensor cores for other weights
    - quantized_early: steps of quantised weights that are on their way before x is there. Others would be in
      front of x, which all blocks wait for.
    - quantized_registers: those of a block of one row with such weights where kernels start early; one of the
      attention with two query heads per KV head has room beside it
    - quantized_o_x: the fewest rows for which a kernel of its own merges the attention's splits, for a
      quantised `o`
    - quantized_repeated_bytes: as repeated_bytes, for quantised weights
    - stages: steps of weights that a block has on their way to shared memory
    - mma_rows: the fewest rows whose products are computed on tensor cores
    - mma_threads, mma_stages, mma_slots: threads, stages and slots with tensor cores; a step of a thread is
      four copies instead of one
    - large_stages, large_hidden: the stages from this hidden size on
    - paired_hidden: the largest hidden size for which products of one row have two slots on tensor cores
    - paired_rows_hidden: the same for 2 to 8 rows; more need more registers
    - wide_hidden: the smallest hidden size for which the narrow tiles of products of one row have 256 columns
    - merged_hidden: the largest hidden size for which the blocks of o merge the splits of one row themselves
    - direct_rows: the fewest rows for which x that a kernel of its own has made stays in global memory
    - direct_tile: columns of the narrow tiles of such products
    - filled_at_once: steps of a ring that a block has on their way at once before it waits for the kernel
      before, where kernels may start early. With tensor cores only.
    - attention_rows: the largest batch whose attention does without tensor cores, where products have them
    - batch_registers: those of a block of batch_attention for heads of up to 128. A block of a product and
      one of o_x have room beside it, so `o` reads its weights while the attention runs.
    - repeated_bytes: what the blocks of a product but o may read, all together, to make x; for more, a
      kernel of its own makes x. With tensor cores only.
    - blocks: blocks of a product per multiprocessor
    - split_rows: the fewest cache rows of a split of the attention
    - slots: blocks of products that a multiprocessor holds at once. Every kernel has a block for each
      multiprocessor and asks for so much shared memory that no other number fits, so that the blocks of a
      kernel that starts early spread evenly. 2: weights of the next kernel are read while a kernel runs.
      Where shared memory is too small for that, there is no limit.
    - early_start: kernels may start before those before them have ended, where the GPU supports it
    - trigger_first: a kernel lets the next one start when its own blocks start, not when they have waited for
      the kernel before
    """

    threads: int = 512
    tile: int = 64
    narrow_tile: int = 128
    head_tile: int = 64
    quantized_tile: int = 64
    quantized_wide_tile: int = 256
    quantized_narrow_tile: int = 256
    quantized_threads: int = 512
    quantized_stages: int = 13
    quantized_slots: int = 1
    quantized_early: int = 1
    quantized_registers: int = 32 << 10
    quantized_o_x: int = 2
    quantized_repeated_bytes: int = 6 << 20
    registers: int = 24 << 10
    stages: int = 13
    mma_rows: int = 1
    mma_threads: int = 256
    mma_stages: int = 7
    mma_slots: int = 1
    large_stages: int = 10
    large_hidden: int = 2560
    paired_hidden: int = 2048
    paired_rows_hidden: int = 1024
    wide_hidden: int = 2048
    merged_hidden: int = 1024
    direct_rows: int = 2
    direct_tile: int = 64
    filled_at_once: int = 2
    repeated_bytes: int = 4 << 20
    blocks: int = 1
    attention_rows: int = 1
    batch_registers: int = 34 << 10
    attention_threads: int = 256
    attention_blocks: int = 1
    split_rows: int = 64
    slots: int = 2
    early_start: bool = True
    trigger_first: bool = True


@dataclass(frozen=True)
class ProductPlan:
    """Shares of the blocks of one product [rows,k] times [k,n].

    `Plan` in gemv.cuh is the same.
    """

    k: int
    n: int
    tile: int
    threads: int
    stages: int
    rows: int
    most_blocks: int
    all_of_x: bool
    whole_tiles: bool = False
    mma: bool = False
    lora_rank: int = 0  # largest rank of adapters
    direct: bool = False  # x stays in global memory

    @property
    def lanes(self) -> int:
        """Rows of the matrix that a step has."""
        return self.threads * 8 // self.tile * (COPIES if self.mma else 1)

    @property
    def steps(self) -> int:
        """Number of steps of a tile."""
        return -(-self.k // self.lanes)

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return -(-self.n // self.tile)

    @property
    def units(self) -> int:
        """Number of steps of all tiles."""
        return self.tiles * self.steps

    @property
    def blocks(self) -> int:
        """Number of blocks, each with at least one step."""
        return min(self.most_blocks, self.tiles if self.whole_tiles else self.units)

    @property
    def parts(self) -> int:
        """Largest number of blocks that share a tile."""
        return max(
            self._block_of((tile + 1) * self.steps - 1) - self._block_of(tile * self.steps) + 1
            for tile in range(self.tiles)
        )

    @property
    def width(self) -> int:
        """Values of a row of x that a block has in shared memory."""
        most = -(-self.units // self.blocks)
        if self.whole_tiles:
            most = -(-self.tiles // self.blocks) * self.steps
        return self.lanes * (self.steps if self.all_of_x or most > self.steps else most)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block.

        They hold copies on their way, x, sums of the warps and sums of adapters.
        """
        x = 0 if self.direct else x_bytes(self.width, self.rows, self.mma)
        return self.ring + x + self.sums + self.lora

    @property
    def lora(self) -> int:
        """Bytes of x A and (x A) B of adapters."""
        if not self.lora_rank:
            return 0
        tiles = (-(-self.units // self.blocks) + self.steps - 2) // self.steps + 1
        return 4 * self.rows * (max(self.threads // 4, 3 * self.lora_rank) + tiles * self.tile)

    @property
    def ring(self) -> int:
        """Bytes of weights on their way to shared memory."""
        return ring_bytes(self.stages, self.threads, self.mma)

    @property
    def sums(self) -> int:
        """Bytes of the sums of the warps."""
        row = SUMS_STRIDE * min(self.rows, SUMS_ROWS) if self.mma else self.tile * self.rows
        return 4 * self.threads // WARP * row

    def _block_of(self, unit: int) -> int:
        return ((unit + 1) * self.blocks - 1) // self.units


def ring_bytes(stages: int, threads: int, mma: bool) -> int:
    """Return the bytes of the weights that a block has on their way."""
    return COPY * stages * threads * (COPIES if mma else 1)


def x_bytes(width: int, rows: int, mma: bool) -> int:
    """Return the bytes of x in shared memory; `x_place` in gemv.cuh has the layout."""
    return 2 * width * (rows + 1 if mma and rows >= 4 else rows)


@dataclass(frozen=True)
class QuantizedProductPlan(ProductPlan):
    """Shares of the blocks of a product with quantised weights.

    `QuantizedPlan` is the same.
    """

    form: Quantized = field(default_factory=lambda: Quantized(4, 128))

    @property
    def lanes(self) -> int:
        k_warps = self.threads // WARP * COLUMNS // self.tile
        return k_warps * PIECES * 8 * COPY // self.form.bits

    @property
    def shared_bytes(self) -> int:
        step = COPY * PIECES * COLUMNS * self.threads // WARP
        steps = max(FEWEST_STEPS, self.ring // step)
        steps = min(steps, -(-self.units // self.blocks) + 1)
        sums = 4 * self.threads // WARP * COLUMNS * self.rows
        x = 2 * self.width * self.rows
        if self._digits:
            steps, x = steps - 1, max(x, step)
        return step * steps + x + sums + self._of_x + self.lora

    @property
    def _half(self) -> int:
        return PIECES // 2 * 8 * COPY // self.form.bits

    @property
    def _digits(self) -> bool:
        """Whether x becomes digits, in shared memory."""
        return self.rows == 1 and not self.form.float8 and self._half <= 2 * self.form.group

    @property
    def _of_x(self) -> int:
        """Bytes of the digits of x, or of its sums over groups; `QuantizedPlan::NOTES`."""
        if self.form.float8:
            return 0
        halves, intervals = self.width // self._half, self._half // min(self.form.group, self._half)
        if self._digits:
            return COPY * halves * (24 if self.form.bits == 4 else 12) + 8 * halves * intervals
        return 4 * halves * intervals * -(-self.rows // 8) * 8


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    - early: the kernel may start before the one before it has ended; it waits by itself
    - cluster: blocks that share their shared memory, neighbours along the first axis of the grid
    """

    name: str
    grid: tuple[int, int]
    threads: int
    shared: int = 0
    early: bool = False
    cluster: int = 1


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
        tuning: FusedTuning,
        adapted: bool = False,
    ) -> None:
        self.lora_rank = shape.lora_rank if adapted else 0
        other = OTHER_MMA_ROWS if shape.quantized or adapted else 0
        self.mma = rows >= max(other, tuning.mma_rows)
        if self.mma:
            paired = tuning.paired_hidden if rows == 1 else tuning.paired_rows_hidden
            slots = 2 if shape.hidden <= paired and rows <= SUMS_ROWS else tuning.mma_slots
            tile = 256 if rows == 1 and shape.hidden >= tuning.wide_hidden else tuning.narrow_tile
            large = shape.hidden >= tuning.large_hidden and not shape.quantized
            stages = tuning.large_stages if large else tuning.mma_stages
            tuning = replace(
                tuning, threads=tuning.mma_threads, stages=stages, slots=slots, narrow_tile=tile
            )
            if shape.quantized and rows <= MOST_WIDE_ROWS:
                stages = max(1, tuning.quantized_stages // COPIES)
                tuning = replace(tuning, threads=tuning.quantized_threads, stages=stages)
        elif shape.quantized:
            tuning = replace(
                tuning,
                threads=tuning.quantized_threads,
                stages=tuning.quantized_stages,
                slots=min(tuning.slots, tuning.quantized_slots),
            )
        elif rows > 1:
            tuning = replace(tuning, slots=min(tuning.slots, 1))
        self.shape, self.rows, self.tuning = shape, rows, tuning
        self._multiprocessors = multiprocessors * tuning.attention_blocks
        self.shared: dict[str, int] = {}  # bytes of a block, by kernel
        # Smaller blocks need less, for GPUs with little shared memory.
        threads = min(128 if self.mma else 256, tuning.threads)
        smaller = replace(tuning, threads=threads, narrow_tile=min(64, tuning.narrow_tile))
        # Blocks that do not make x themselves need only their share of x.
        smallest = replace(smaller, repeated_bytes=0, quantized_repeated_bytes=0)
        if not any(self._fit(multiprocessors, most_shared, each) for each in (tuning, smaller, smallest)):
            raise EngineError(f"the fused kernels need more than {most_shared} bytes of shared memory")

    @property
    def files(self) -> tuple[str, ...]:
        """Sources of the kernels, after those of the hardware."""
        return DRAFT_FILES if self.shape.joined else FILES

    def _fit(self, multiprocessors: int, most_shared: int, tuning: FusedTuning) -> bool:
        """Choose shares and stages; return whether they fit into shared memory."""
        self.tuning = tuning
        least_stages = 3 if self.mma else 4
        for count in range(tuning.slots, -1, -1):
            # so many blocks have room at once, and not one more
            limit = (most_shared + RESERVED) // max(1, count) - RESERVED
            least = (most_shared + RESERVED) // (count + 1) if count else 0
            # More blocks have smaller shares of x, fewer stages a smaller ring.
            factors = (1,) if count else (1, 2, 4, 8, 16, 32, 64)
            for factor in factors:
                for stages in range(tuning.stages, min(tuning.stages, least_stages if count else 2) - 1, -1):
                    self._cut(stages, multiprocessors, factor * tuning.blocks)
                    static = {"o": 0 if self.apart["o"] else self._shares_of_splits()}
                    # The table's product takes x into shared memory; nothing follows it.
                    most = {"lm_head": most_shared} if self.direct and self.shape.tied else {}
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
        shape, tuning, rows = self.shape, self.tuning, self.rows
        blocks = multiprocessors * blocks_each
        self.direct = self.mma and rows >= tuning.direct_rows and not self.lora_rank

        def product(
            k: int, n: int, tile: int, all_of_x: bool, whole: bool = False, ready: bool = False
        ) -> ProductPlan:
            sizes = tuning.threads, stages, rows, blocks, all_of_x
            rank = 0 if whole else self.lora_rank
            return ProductPlan(k, n, tile, *sizes, whole, self.mma, rank, ready and self.direct)

        def apart(nbytes: int, name: str) -> bool:
            """Return whether a kernel of its own makes x.

            nbytes: what blocks would read to make it.
            """
            form = shape.form(name)
            most = tuning.repeated_bytes if form is None else tuning.quantized_repeated_bytes
            return (self.mma or form is not None) and nbytes > most

        def layer_product(name: str, k: int, n: int, all_of_x: bool, narrow: bool = False) -> ProductPlan:
            form = shape.form(name)
            if form is None:
                ready = self.apart.get(name, False)
                narrow_tile = tuning.direct_tile if ready and self.direct else tuning.narrow_tile
                return product(k, n, narrow_tile if narrow else tuning.tile, all_of_x, ready=ready)
            tile = tuning.quantized_tile if name == "qkv" else tuning.quantized_wide_tile
            tile = min(tuning.quantized_narrow_tile if narrow else tile, tuning.threads // 2)
            sizes = tuning.threads, stages, rows, blocks, all_of_x
            rank = self.lora_rank
            return QuantizedProductPlan(k, n, tile, *sizes, mma=self.mma, lora_rank=rank, form=form)

        self.stages = stages
        inputs = (1 + shape.joined) * shape.hidden
        norms = 8 * rows * shape.hidden * blocks
        self.apart = {name: apart(norms, name) for name in ("qkv", "gate_up", "lm_head")}
        if shape.joined:
            self.apart |= {"qkv": False, "lm_head": False}
        # Blocks that merge splits wait for several reads, one after the other, however few bytes they read.
        merges = rows == 1 and shape.hidden <= tuning.merged_hidden
        form = shape.form("o")
        if form is None:
            self.apart["o"] = self.mma and not merges
        else:
            self.apart["o"] = self.mma or rows >= tuning.quantized_o_x or form.ordered
        self.products = {
            "qkv": layer_product("qkv", inputs, shape.qkv_size, not self.apart["qkv"]),
            "o": layer_product("o", shape.q_size, shape.hidden, False, narrow=True),
            "gate_up": layer_product("gate_up", shape.hidden, 2 * shape.inner, not self.apart["gate_up"]),
            "down": layer_product("down", shape.inner, shape.hidden, False, narrow=True),
        }
        sums = 8 * rows * self.products["down"].width * self.products["gate_up"].parts  # of gate and up
        self.apart["down"] = apart(sums * self.products["down"].blocks, "down")
        if self.apart["down"]:  # x of which is not read by each block
            self.products["down"] = layer_product("down", shape.inner, shape.hidden, False, narrow=True)
        self.blocks = {name: plan.blocks for name, plan in self.products.items()}
        self.shared = {name: plan.shared_bytes for name, plan in self.products.items()}
        if shape.tied:
            tokens = 16 if self.mma else 1  # of a warp at once
            self.blocks["lm_head"] = min(blocks, -(-shape.vocab // tokens))
            x = x_bytes(shape.hidden, rows, True) if self.mma else 2 * -(-shape.hidden // 256) * 256 * rows
            sums = 4 * tuning.threads // WARP * rows
            self._head_bytes = ring_bytes(stages, tuning.threads, self.mma) + x + sums
        else:
            ready = self.apart["lm_head"]
            plan = product(shape.hidden, shape.vocab, tuning.head_tile, not ready, True, ready)
            self.products["lm_head"] = plan
            self.blocks["lm_head"], self._head_bytes = plan.blocks, plan.shared_bytes
        self.shared["lm_head"] = self._head_bytes
        per_kv_head = shape.heads // shape.kv_heads
        self.groups = -(-per_kv_head // 4)
        wanted = multiprocessors * tuning.attention_blocks // (shape.kv_heads * self.groups)
        self.splits = max(1, min(MOST_SPLITS, wanted, -(-shape.capacity // tuning.split_rows)))

    def _shares_of_splits(self) -> int:
        """Return the bytes of static shared memory of the kernel `o`."""
        heads = min(self.shape.heads, self.products["o"].width // self.shape.head_dim + 3)
        return 4 * self.rows * heads * self.splits

    def makes_new_rows(self, tokens: int) -> bool:
        """Return whether other kernels take the place of `attention`.

        They are new_rows and tree_attention, or batch_attention.
        """
        return tokens > 1 or (self.mma and self.rows > self.tuning.attention_rows)

    def attends_in_batch(self, tokens: int) -> bool:
        """Return whether batch_attention takes the place of new_rows and tree_attention.

        It has a warp for each head that it makes, and starts early only beside single blocks of products
        that leave registers.
        """
        heads = self.shape.heads // self.shape.kv_heads + 2
        room = heads * WARP <= self.tuning.attention_threads
        beside = self.tuning.slots < 2 and not self.shape.quantized and not self.lora_rank
        return tokens == 1 and self.makes_new_rows(1) and beside and room

    def tree_splits(self, rows: int, tokens: int) -> int:
        """Return the most splits of tree_attention.

        They are so many that its blocks fill the device once.
        """
        blocks = self.shape.kv_heads * self._query_tiles(tokens) * (rows // tokens)
        return max(1, min(self.splits, self._multiprocessors // blocks))

    def _query_tiles(self, tokens: int) -> int:
        """Return among how many blocks of tree_attention a KV head's queries are divided."""
        queries = 16 if self.shape.head_dim <= 128 else 8
        return -(-tokens * self.shape.heads // self.shape.kv_heads // queries)

    def has(self, name: str) -> bool:
        """Return whether a step has this kernel.

        Kernels with names in _x make x of a product.
        """
        return not name.endswith("_x") or self.apart[name.removesuffix("_x")]

    def launch(self, name: str, rows: int, early: bool, tokens: int = 1) -> Launch:
        """Return how a kernel is launched for so many rows, `tokens` of each sequence."""
        tuning, shape = self.tuning, self.shape
        if name in ("tree_attention", "batch_attention"):
            blocks = shape.kv_heads * self._query_tiles(tokens) * self.tree_splits(rows, tokens)
            return Launch(name, (blocks, rows // tokens), tuning.attention_threads, 0, early)
        if name == "new_rows":
            heads = shape.heads + 2 * shape.kv_heads
            grid = -(-heads * WARP // tuning.attention_threads), rows
            return Launch(name, grid, tuning.attention_threads, 0, early)
        if name == "last_state":
            blocks = -(-rows * shape.hidden // (2 * tuning.threads))
            return Launch(name, (blocks, 1), tuning.threads, 0, early)
        if name.endswith("_x"):
            of_a_block = {"down_x": 4 * tuning.threads, "o_x": tuning.threads // WARP * shape.head_dim}
            size = {"down_x": shape.inner, "o_x": shape.q_size}
            grid = (-(-size[name] // of_a_block[name]), rows) if name in size else (rows, 1)
            return Launch(name, grid, tuning.threads, 0, early)
        name, kernel = OF_DRAFTS.get(name, name), name
        shared = self.shared[name]
        if name == "attention":
            blocks = self.shape.kv_heads * self.groups * self.splits
            grid = max(blocks, self.fill if rows == 1 else 0), rows
            return Launch(kernel, grid, tuning.attention_threads, shared, early)
        return Launch(kernel, (max(self.fill, self.blocks[name]), 1), tuning.threads, shared, early)

    def scratch_bytes(self) -> dict[str, int]:
        """Return the sizes of the buffers between the kernels."""
        shape, rows = self.shape, self.rows
        return {
            "residual": 8 * rows * shape.hidden,
            "qkv": 4 * self.products["qkv"].parts * rows * shape.qkv_size,
            "gate_up": 4 * self.products["gate_up"].parts * rows * 2 * shape.inner,
            "x": x_bytes(max(shape.hidden, shape.inner, shape.q_size), rows, self.mma),
            "queries": 2 * rows * shape.q_size,
            "split_sums": 4 * rows * self.splits * shape.q_size,
            "split_scales": 8 * rows * self.splits * shape.heads,
        }

    def macros(self) -> list[tuple[str, str]]:
        """Return names and values of the macros that the kernels are compiled with."""
        shape, tuning = self.shape, self.tuning
        registers = 0 if tuning.slots < 2 or self.lora_rank else tuning.registers  # 0: no limit
        early_registers = tuning.quantized_registers if self.rows == 1 else REGISTERS
        if any(not form.plain for _, form in shape.quantized):
            early_registers = max(early_registers, MORE_REGISTERS)
        if not shape.quantized or self.lora_rank:
            early_registers = 0
        batch_registers = tuning.batch_registers if shape.head_dim <= 128 else REGISTERS
        values: dict[str, object] = {
            "BF16": int(shape.dtype == "bf16"),
            "FP8_CACHE": int(shape.fp8_cache),
            "ROWS": self.rows,
            "TENSOR_CORES": int(self.mma),
            "LORA_RANK": self.lora_rank,
            "THREADS": tuning.threads,
            "STAGES": self.stages,
            "FILLED_AT_ONCE": tuning.filled_at_once if self.mma else self.stages,
            "QUANTIZED_EARLY": tuning.quantized_early,
            "TRIGGER_FIRST": int(tuning.trigger_first),
            "MOST_REGISTERS": registers // tuning.threads,
            "EARLY_REGISTERS": min(255, early_registers // tuning.threads),
            "ATTENTION_THREADS": tuning.attention_threads,
            "ATTENDS_BY_ROW": int(not self.makes_new_rows(1)),
            "ATTENDS_IN_BATCH": int(self.attends_in_batch(1)),
            "BATCH_REGISTERS": min(255, batch_registers // tuning.attention_threads),
            "SPLITS": self.splits,
            "SPLIT_ROWS": tuning.split_rows,
            "HIDDEN": shape.hidden,
            "JOINED": int(shape.joined),
            "HEADS": shape.heads,
            "KV_HEADS": shape.kv_heads,
            "HEAD_DIM": shape.head_dim,
            "INNER": shape.inner,
            "VOCAB": shape.vocab,
            "ROTARY_DIM": shape.rotary_dim,
            "CAPACITY": shape.capacity,
            "EPSILON": f"{float(shape.epsilon)!r}f",
            "INTERLEAVED": int(shape.interleaved),
            "QK_NORM": int(shape.qk_norm),
            "QKV_BIAS": int(shape.qkv_bias),
            "MLP_BIAS": int(shape.mlp_bias),
            "TIED": int(shape.tied),
            "LM_HEAD_BLOCKS": self.blocks["lm_head"],
            "LM_HEAD_SHARED": self._head_bytes,
        }
        values |= {f"{name.upper()}_X": int(apart) for name, apart in self.apart.items()}
        for name, plan in self.products.items():
            prefix = name.upper()
            values |= {f"{prefix}_TILE": plan.tile, f"{prefix}_BLOCKS": plan.blocks}
            values[f"{prefix}_DIRECT"] = int(plan.direct)
            values |= {f"{prefix}_SHARED": plan.shared_bytes, f"{prefix}_PARTS": plan.parts}
            form = shape.form(name)
            values[f"{prefix}_BITS"] = 16 if form is None else form.bits
            values[f"{prefix}_GROUP"] = 0 if form is None else form.group
            values[f"{prefix}_ZERO_POINTS"] = str(form is not None and form.zero_points).lower()
            values[f"{prefix}_FLOAT8"] = str(form is not None and form.float8).lower()
            values[f"{prefix}_ORDERED"] = str(form is not None and form.ordered).lower()
        return [(name, str(value)) for name, value in values.items()]
