# SPDX-License-Identifier: Apache-2.0
"""Options of an export, in Python and on the command line; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_ros.engine_directory.choices import GROUP_SIZES, KV_CACHES, LEROBOTS, PRECISIONS, ROUNDINGS
from edgellm_ros.option import option

if TYPE_CHECKING:
    from edgellm_ros.builder.calibration.search import GroupScales

POLICIES = "policies"  # a group of `edgellm export --help`


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Choices of an export. Lengths are in tokens.

    - precision: type of weights, activations and, without `kv_cache`, KV cache. In every precision norms are
      computed in fp32, and RoPE rows, logits, pixels, time and trajectories are fp32 inputs and outputs. fp32
      and fp16 run everywhere (on a CPU, ONNX Runtime computes most of fp16 in fp32); bf16 is for GPUs only
    - kv_cache: "fp8" stores keys and values as FP8 (E4M3) without scales: values beyond 448 become 448. None
      = in `precision`. TensorRT does not support FP8 (docs/engine_directory.md)
    - max_lora_rank: largest rank of adapters; 0 = no LoRA inputs, None = the largest rank among the adapters
      in the checkpoint's folder `lora`, which are copied unless max_lora_rank is 0
    - hidden_state_layers: layers (from 1) whose hidden states become outputs
    - lm_head_input: the matrix of the LM head becomes an input, so that it can be exchanged
      (`LLMInferenceRuntime.set_lm_head_weights`)
    - vocab_map: file with the only tokens whose logits are computed, see `read_vocab_map`
    - draft: directory of an EAGLE-3 head or a DFlash drafter for this model; None = the checkpoint's folder
      `draft`, if there is one, else the MTP head that is among its tensors, unless `with_draft` is false
    - draft_vocab_size: tokens that an MTP head or a DFlash drafter drafts; None = 32,768 or 65,536
    - max_draft_tree_size: most drafted tokens of a sequence that the head keeps in its KV cache
    - max_verify_tree_size: most tokens that the model verifies in one run
    - quantize: "int4" or "int8" rounds the weights of the language model's layers to nearest, in groups of
      `group_size` inputs that share a scale. Embeddings, encoders, action expert and draft head keep
      `precision`; the LM head does in fp32, and else gets 8 bits. The weights of a checkpoint that is
      quantised stay as they are. Of a policy "int8" alone, for layers of language model, vision tower and
      action head, and mostly for the embedding table (docs/policies.md)
    - scales: of the inputs of the language model's layers, moved into the weights before and after
      (`builder/exporter/calibration.py` finds those with which rounding changes least)
    - cpu_int8: the graphs for a CPU multiply in 8 bits (`builder/passes/int8_products.py`), those of encoders
      and draft head too, of a policy those of the layers that `quantize` rounds; the other graphs do not
      change. Needs precision fp32
    - mmproj: of a GGUF file: the file of its vision tower; None = the one `*mmproj*.gguf` in the folder, if
      the model is alone there
    - vlm: of a policy: folder with configuration and tokenizer of its vision language model, of a pi0 or
      pi0.5 the tokenizer alone; None = the checkpoint's folder `vlm`, or the folder that a SmolVLA names
    - lerobot: of a pi0 or pi0.5: the version of LeRobot that it was trained with, "0.4" or "0.5" for this and
      later ones; None = as files of the checkpoint tell
    - dataset: of a policy: the folder `meta` of a LeRobot data set, for names and rate, and for statistics
      that the checkpoint does not have
    - embodiment: of a policy for several robots, such as GR00T: the one whose encoders, decoder and
      statistics the engine has
    """

    precision: str = option("fp32", "type of weights and KV cache (default: %(default)s)", choices=PRECISIONS)
    kv_cache: str | None = option(
        None,
        "store keys and values in 8 bits (E4M3), and report what that cost in logits; not for TensorRT and "
        "draft heads (default: as --precision)",
        choices=KV_CACHES,
    )
    max_batch_size: int = option(4, "sequences decoded together (default: %(default)s)", least=1)
    max_input_len: int = option(
        320,
        "tokens of one run: longer prompts are computed in several, but images, videos and sounds of a "
        "prompt must fit into one (default: %(default)s)",
        least=1,
    )
    max_kv_cache_capacity: int = option(
        448, "longest prompt plus answer in tokens (default: %(default)s)", least=1
    )
    max_lora_rank: int | None = option(
        None,
        "largest rank of LoRA adapters; 0: the engine takes none (default: what the adapters in "
        "CHECKPOINT/lora need, which are copied)",
        least=0,
    )
    hidden_state_layers: tuple[int, ...] = option(
        (),
        "layers, from 1, whose hidden states become outputs (default: none)",
        flag="hidden-states",
        metavar="N[,N...]",
        least=1,
    )
    lm_head_input: bool = option(
        False, "make the LM head's matrix an input, so that it can be exchanged at run time"
    )
    vocab_map: str | Path | None = option(
        None,
        "safetensors file whose tensor vocab_map lists the tokens to generate (default: all)",
        metavar="FILE",
    )
    draft: str | Path | None = option(
        None,
        "directory of an EAGLE-3 head or DFlash drafter for this checkpoint (default: CHECKPOINT/draft, if "
        "any, else the checkpoint's MTP head, if it has one)",
        metavar="HEAD_DIR",
        exclusive=True,
    )
    with_draft: bool = option(True, "export no draft head", flag="no-draft", exclusive=True)
    draft_vocab_size: int | None = option(
        None,
        "tokens that an MTP head or a DFlash drafter drafts, the most frequent ones by the tokenizer's "
        "merges: each of its runs reads their rows of the LM head (default: 32768 of MTP, 65536 of DFlash)",
        least=1,
    )
    max_draft_tree_size: int = option(
        64,
        "most drafted tokens of a sequence in the KV cache of the draft head (default: %(default)s)",
        least=1,
    )
    max_verify_tree_size: int = option(
        64,
        "most drafted tokens and the one before them that are verified in one run (default: %(default)s)",
        least=2,
    )
    quantize: str | None = option(
        None,
        "round the weights of the language model's layers to nearest, of a policy (int8) those of all large "
        "layers, and report what that cost in logits or actions (default: keep the checkpoint's)",
        choices=ROUNDINGS,
    )
    group_size: int = option(
        64, "inputs that share a scale, with --quantize (default: %(default)s)", choices=GROUP_SIZES
    )
    scales: tuple[GroupScales, ...] = ()
    cpu_int8: bool = option(
        False,
        "let the graphs for a CPU multiply in 8 bits, encoders and draft head included, and report what that "
        "cost in logits or actions; other devices compute as without it (needs --precision fp32)",
    )
    mmproj: str | Path | None = option(
        None,
        "vision tower of a model in GGUF (default: the one *mmproj*.gguf beside the one model of a folder)",
        metavar="FILE",
    )
    vlm: str | Path | None = option(
        None,
        "config.json and tokenizer.json of the policy's vision language model, of a pi0 or pi0.5 the latter "
        "alone (default: CHECKPOINT/vlm, or the folder that a SmolVLA names)",
        metavar="DIR",
        group=POLICIES,
    )
    dataset: str | Path | None = option(
        None,
        "the folder meta of the LeRobot data set that the policy was trained with: names of the values of "
        "state and action, rate, and statistics that the checkpoint does not have (default: 30 actions per "
        "second)",
        metavar="DIR",
        group=POLICIES,
    )
    lerobot: str | None = option(
        None,
        "LeRobot that a pi0 or pi0.5 was trained with, 0.5 for later ones and for weights of openpi: padding "
        "of images and prompts differ (default: as the checkpoint's files tell)",
        choices=LEROBOTS,
        group=POLICIES,
    )
    embodiment: str | None = option(
        None,
        "the robot that the engine is for, of a policy that was trained for several, such as GR00T (default: "
        "the only one that there is)",
        metavar="TAG",
        group=POLICIES,
    )
