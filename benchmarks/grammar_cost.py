# SPDX-License-Identifier: Apache-2.0
"""Cost of grammars per token, with and without speculative decoding.

Measures
--------
For each of --settings and each grammar of GRAMMARS ("none": no grammar):

- token_ms: the runtime's own time of the decode stage per token of a sequence; median of --runs runs. All
  pairs of settings and grammars take turns in every run.
- times_none: token_ms relative to "none" of the same setting.
- tokens_per_verification, of the sequences that draft; equal: answers that are equal to those of "off" with
  the same grammar. Drafts do not fall back to vanilla steps.
- host_us, in vanilla steps: `masks`, from the tokens to the masks of a step on the host; `mask_logits`, the
  kernel that excludes tokens from the logits of the batch.

Conditions
----------
With --checkpoint: the prompts are scenes of the arena's test split, with a camera frame and a typed command.
"text" allows the characters of the demo's answers; the schemas are strange to the demo's model.

With --shape: random weights and a vocabulary of words of the Python library, so answers have no sense, and
those without a grammar have other tokens. No answer ends before --tokens tokens. Settings that draft are
refused.

Greedy, no prefix reuse, steps recorded as graphs where the device has graphs.

Examples
--------
    python -m benchmarks.grammar_cost --checkpoint models/arena --settings off,chain7
    python -m benchmarks.grammar_cost --shape qwen3-1.7b --precision fp16 --device cuda --batch 1,8

Last JSON line: the options and `batches`, the figures of each batch size.

"""

from __future__ import annotations

import argparse
import json
import re
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.common import StopWatch, changed, finish, machine, numbers
from benchmarks.decode_runs import make_requests
from benchmarks.model_shapes import BYTES_PER_VALUE, add_shape
from benchmarks.random_checkpoint import NEVER, write_checkpoint
from benchmarks.speculation import scene_requests
from benchmarks.speculation_runs import OFF, OPTIONS, Contender, Run, parse_setting
from edgellm_ros.builder import export
from edgellm_ros.cli.arguments import DEVICES, integer
from edgellm_ros.engine.device import Device, open_device
from edgellm_ros.fused.loading.availability import AUTO, DECODES
from edgellm_ros.runtime.grammar import grammar
from edgellm_ros.runtime.request import LLMGenerationRequest

NONE = "none"
SCHEMA = {
    "type": "object",
    "properties": {
        "action": {"enum": ["drive", "turn", "stop"]},
        "target": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 40}}},
        "way": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "x": {"type": "number", "minimum": -50, "maximum": 50},
                    "y": {"type": "number", "minimum": -50, "maximum": 50},
                    "what": {"type": "string"},
                },
                "required": ["x", "y", "what"],
                "additionalProperties": False,
            },
            "minItems": 100,
        },
    },
    "required": ["action", "target", "way"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, dict[str, Any]] = {
    NONE: {},
    "text": {"regex": "[A-Za-z0-9 ,.'-]*"},
    "schema": {"json_schema": SCHEMA},
}
ENDLESS = {"regex": "[A-Za-z0-9 ,.'-]{2000,}"}  # in place of "text" with random weights
KERNEL_RUNS = 50
WARM_UP_RUNS = 1


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    args = _parse(arguments)
    clock, device = StopWatch(), open_device(args.device)
    grammars = GRAMMARS if args.checkpoint else {**GRAMMARS, "text": ENDLESS}
    with tempfile.TemporaryDirectory() as temporary:
        root = args.directory or Path(temporary)
        engine = _engine(args, root)
        clock.done("export")
        contenders = [
            Contender(name, engine, device, parse_setting(name) if name != OFF else None, False, args.decode)
            for name in args.settings
        ]
        for contender in contenders:
            contender.runtime.record()
        clock.done("load")
        batches = []
        for batch in args.batch:
            batches.append(_measure(args, batch, contenders, grammars))
            clock.done(f"batch_{batch}")
            print(json.dumps(batches[-1]), file=sys.stderr)
    return finish(
        "grammar_cost",
        changes={
            **changed(OPTIONS, {"decode": args.decode}),
            "drafting": "off, and each setting with falls_back=False",
        },
        model=str(args.checkpoint) if args.checkpoint else args.shape.model_type,
        vocabulary=contenders[0].runtime.config.output_vocab_size,
        precision=args.precision,
        decode=args.decode,
        device=args.device,
        **machine(device),
        tokens=args.tokens,
        runs=args.runs,
        batches=batches,
        seconds=clock.seconds,
    )


def _engine(args: argparse.Namespace, root: Path) -> Path:
    """Export the checkpoint, with its draft head if it has one."""
    engine, most = root / "engine", max(args.batch)
    if args.checkpoint is not None:
        export(args.checkpoint, engine, precision=args.precision, max_batch_size=most)
        return engine
    checkpoint = write_checkpoint(root / "checkpoint", args.shape, args.precision)
    word_tokenizer(args.shape.vocab_size).save(str(checkpoint / "tokenizer.json"), pretty=False)
    context = args.context + args.tokens
    export(
        checkpoint,
        engine,
        precision=args.precision,
        max_batch_size=most,
        max_input_len=args.context,
        max_kv_cache_capacity=context,
    )
    return engine


def word_tokenizer(size: int) -> Tokenizer:
    """Make a tokenizer of bytes, and of words and word parts of the Python library.

    The last token is the stop token, as in `random_checkpoint`.
    """
    found: Counter[str] = Counter()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        found.update(re.findall(r" ?\w+|\s+|[^\w\s]+", file.read_text(encoding="utf-8", errors="ignore")))
        if len(found) > 2 * size:
            break
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = dict.fromkeys(sorted(level.alphabet()))
    for word, _ in found.most_common():
        for part in (word[:12], word[:5], word[-4:]):
            if len(part) > 1:
                tokens.setdefault(level.pre_tokenize_str(part)[0][0])
    names = list(dict.fromkeys([*tokens, *(f"\u0120{index}" for index in range(size))]))[: size - 1]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(NEVER, special=True, normalized=False)])
    return tokenizer


def _requests(
    args: argparse.Namespace, batch: int, rules: dict[str, Any]
) -> list[list[LLMGenerationRequest]]:
    """Make the batches of requests with a grammar."""
    if args.checkpoint is None:
        requests = make_requests(batch, args.context, args.tokens)
    else:
        requests = scene_requests(args.scenes, args.tokens)
    requests = [replace(one, sampling=replace(one.sampling, **rules)) for one in requests]
    return [requests[first : first + batch] for first in range(0, len(requests), batch)]


def _measure(
    args: argparse.Namespace, batch: int, contenders: Sequence[Contender], grammars: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Measure all settings and grammars in turns."""
    requests = {name: _requests(args, batch, rules) for name, rules in grammars.items()}
    runs: dict[tuple[str, str], list[Run]] = {}
    masks: list[float] = []
    for number in range(WARM_UP_RUNS + args.runs):
        for name, groups in requests.items():
            for contender in contenders:
                run = contender.run(groups)
                if number >= WARM_UP_RUNS:
                    runs.setdefault((contender.name, name), []).append(run)
    write_masks = grammar.write_masks
    if contenders[0].name == OFF:
        from edgellm_ros.runtime.batch import sampling_rows

        def timed(*arguments: Any, **options: Any) -> None:
            start = time.perf_counter()
            write_masks(*arguments, **options)
            masks.append(time.perf_counter() - start)

        sampling_rows.write_masks = timed
        try:
            contenders[0].run(requests["schema"])
        finally:
            sampling_rows.write_masks = write_masks
    figures = []
    for (setting, name), mine in runs.items():
        token_ms = [run.token_s * 1e3 for run in mine]
        none_ms = median(run.token_s * 1e3 for run in runs[setting, NONE])
        reference = runs.get((OFF, name), mine)[0].token_ids
        figures.append(
            {
                "setting": setting,
                "grammar": name,
                "token_ms": median(token_ms),
                "times_none": median(token_ms) / none_ms,
                "tokens": mine[0].tokens,
                "tokens_per_verification": mine[0].verified_tokens / max(1, mine[0].verified_trees),
                "equal": sum(map(list.__eq__, mine[0].token_ids, reference)),
                "answers": len(reference),
            }
        )
    device = contenders[0].runtime.pipeline.device
    host_us = {
        "masks_median": median(masks) * 1e6 if masks else None,
        "masks_mean": sum(masks) / len(masks) * 1e6 if masks else None,
        "mask_logits": _kernel_us(contenders[0], device, batch),
    }
    return {"batch": batch, "figures": figures, "host_us": host_us}


def _kernel_us(contender: Contender, device: Device, batch: int) -> float:
    """Measure the excluding kernel; half of the tokens are excluded."""
    pipeline = contender.runtime.pipeline
    logits = pipeline.logits.rows(0, batch)
    words = grammar.word_count(logits.shape[2])
    masks = device.empty((batch, 1, words), np.uint32)
    device.upload(masks, np.full((batch, 1, words), 0x55555555, np.uint32))
    seconds = []
    for _ in range(5):
        start = device.mark()
        for _ in range(KERNEL_RUNS):
            pipeline.sampling._kernels.mask_logits(logits, masks)
        seconds.append(device.mark().seconds_since(start) / KERNEL_RUNS)
    return median(seconds) * 1e6


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group()
    add_shape(model)
    model.add_argument("--checkpoint", type=Path, help="a checkpoint with an arena's prompt")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--decode", choices=DECODES, default=AUTO)
    parser.add_argument("--precision", choices=list(BYTES_PER_VALUE), default="fp32")
    parser.add_argument("--batch", type=numbers(integer(1)), default="1")
    names = "off, or settings of benchmarks.speculation (default: off)"
    parser.add_argument("--settings", type=lambda text: text.split(","), default=[OFF], help=names)
    parser.add_argument("--scenes", type=integer(1), default=20)
    parser.add_argument("--context", type=integer(1), default=64, help="tokens of a prompt, with --shape")
    parser.add_argument("--tokens", type=integer(2), default=64)
    parser.add_argument("--runs", type=integer(1), default=3)
    parser.add_argument("--directory", type=Path, help="keep checkpoint and engine here")
    args = parser.parse_args(arguments)
    for name in args.settings:
        if name != OFF:
            parse_setting(name)
            if args.checkpoint is None:
                parser.error(f"--settings {name}: drafting needs --checkpoint")
    return args


if __name__ == "__main__":
    main()
