# SPDX-License-Identifier: Apache-2.0
"""Speed of speculative decoding beside decoding of one token per step.

Measures
--------
For "off" and each of --settings, on the path that users take (`LLMInferenceRuntime(drafting=...)`):

- decode: time per token of a sequence, the runtime's own time of the decode stage; medians of --runs runs.
  The settings take turns in every run, since a machine's speed varies.
- round: time of a draft, its verification and the acceptance: the decode time divided by the rounds.
- times_vanilla: how many times as fast as "off". pays_from: the tokens per verification from which a setting
  is faster than "off": its round divided by the step of "off".
- stages: each level of the draft, the choice of the tree, the verification, and the acceptance (sampling, KV
  rows, commits). They are measured in a run of its own, in which the device is idle before each stage and
  no graphs are used; so their sum is more than a round. With --profile they are also measured as they run in
  recorded rounds, from the times of kernels. A chain that one kernel drafts has no levels, and without
  --profile it is part of the verification.

Conditions
----------
With --shape, base model and head have random weights: the head has the proportions of published EAGLE-3 heads
(one layer, sizes of the base's layers, 32,000 logits), with a shape of Qwen3.5 those of its MTP head (mtpN of
--settings), with dflashN those of a DFlash drafter (5 layers, blocks of 16). THE ACCEPTANCE IS FORCED to each
of --acceptance, which every result tells ("acceptance": "forced"). How: `benchmarks/forced_acceptance.py`.
`own_tokens` is the share of forced tokens that the sampler chose by itself, which is 1 up to rounding.

With --checkpoint (and --head, or its folder `draft`), weights and acceptance are real ("real"). The prompts
are scenes of the arena's test split with a camera frame and a typed command, or the lines of --prompts.
`same_answers` is the number of answers that are equal to those of "off".

Greedy (but for --temperature), no prefix reuse, no fallback to vanilla steps (`falls_back=False`), steps
recorded as graphs where the device has graphs.

Examples
--------
    python -m benchmarks.speculation --shape qwen3-1.7b --precision fp16 --device cuda --acceptance 3
    python -m benchmarks.speculation --shape qwen3.5-0.8b --device cuda --settings mtp3 --acceptance 2.5
    python -m benchmarks.speculation --shape qwen3-4b --device cuda --settings dflash7 --acceptance 3
    python -m benchmarks.speculation --checkpoint models/arena --head models/arena/draft --scenes 50

Standard error has the duration of each phase. Last JSON line: the options and `batches`, the figures of each
batch size: `off` and `settings`.

"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import SEED, StopWatch, changed, finish, machine, numbers
from benchmarks.decode_runs import PROFILED_STEPS, make_requests, profile_events, prompt_ids
from benchmarks.forced_acceptance import ForcedTreeKernels
from benchmarks.kernel_profile import KernelProfile, format_table, rows_of
from benchmarks.model_shapes import BYTES_PER_VALUE, SHAPES, add_shape
from benchmarks.published_models import MODELS, PublishedModel, parse_any
from benchmarks.random_checkpoint import write_checkpoint
from benchmarks.random_head import add_mtp_head, write_block_drafter, write_head
from benchmarks.speculation_runs import OFF, OPTIONS, Batches, Contender, Run, parse_setting, stages_of
from edgellm_arena.episodes.situation import sample_situations, split_rng
from edgellm_arena.world.renderer import render
from edgellm_ros.builder import export
from edgellm_ros.builder.config.prompt_files import TEMPLATE_FILE, TOKENIZER_FILE
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.builder.exporter.sources import DRAFT_FOLDER
from edgellm_ros.cli.arguments import DEVICES, integer
from edgellm_ros.engine.device import Device, open_device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.fused.loading.availability import AUTO, DECODES
from edgellm_ros.runtime.decoding.speculative.drafting_config import DFLASH, SpecDecodeDraftingConfig
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams

WARM_UP_RUNS = 1
MOST_STAGE_BATCHES = 10  # that the stages are measured with
STAMP = "benchmark_options.json"  # in the engine directory: what it was exported with


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    args = _parse(arguments)
    clock, device = StopWatch(), open_device(args.device)
    with tempfile.TemporaryDirectory() as temporary:
        root = args.directory or Path(temporary)
        checkpoint, head = _checkpoint(args, root)
        clock.done("checkpoint")
        batches = {batch: _requests(args, batch) for batch in args.batch}
        engine = _engine(args, root, checkpoint, head, batches, device)
        clock.done("export")
        results = _Comparison(args, engine, device, clock).results(batches)
    return finish(
        "speculation",
        changes={
            **changed(OPTIONS, {"decode": args.decode, "cuda_graphs": args.graphs}),
            "drafting": "off, and each setting with falls_back=False",
        },
        acceptance="real" if args.checkpoint else "forced",
        model=str(args.checkpoint) if args.checkpoint else asdict(args.shape),
        precision=args.precision,
        device=args.device,
        decode=args.decode,
        **machine(device),
        prompts=len(next(iter(batches.values()))) if args.checkpoint else None,
        context=None if args.checkpoint else args.context,
        tokens=args.tokens,
        temperature=args.temperature,
        runs=args.runs,
        **results,
        seconds=clock.seconds,
    )


def _checkpoint(args: argparse.Namespace, root: Path) -> tuple[Path, Path | None]:
    """Return the directories of the base model and of its head, None without one."""
    if args.checkpoint is None:
        checkpoint = write_checkpoint(root / "checkpoint", args.shape, args.precision)
        if any(setting.strategy == DFLASH for setting in args.settings.values()):
            return checkpoint, write_block_drafter(root / "drafter", args.shape, args.precision)
        if isinstance(args.shape, PublishedModel):
            add_mtp_head(checkpoint, args.shape, args.precision)
            return checkpoint, None
        return checkpoint, write_head(root / "head", args.shape, args.precision)
    folder = args.checkpoint / DRAFT_FOLDER
    return args.checkpoint, args.head or (folder if folder.is_dir() else None)


def _requests(args: argparse.Namespace, batch: int) -> list[list[LLMGenerationRequest]]:
    """Make the batches of requests for one batch size."""
    if args.checkpoint is None:
        return [make_requests(batch, args.context, args.tokens)]
    if args.prompts is None:
        requests = scene_requests(args.scenes, args.tokens)
    else:
        lines = args.prompts.read_text(encoding="utf-8").splitlines()
        sampling = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=SEED)
        requests = [LLMGenerationRequest(prompt=line, sampling=sampling) for line in lines if line.strip()]
    return [requests[first : first + batch] for first in range(0, len(requests), batch)]


def scene_requests(scenes: int, tokens: int) -> list[LLMGenerationRequest]:
    """Make requests for typed commands in scenes of the arena's test split.

    The answers are without trajectories.
    """
    rng = split_rng(SEED, "test")
    return [
        LLMGenerationRequest(
            prompt=situation.command.text,
            images=(render(situation.scene, situation.state, rng),),
            history=situation.history,
            speed=situation.state.speed,
            sampling=SamplingParams(max_tokens=tokens),
        )
        for situation in sample_situations(rng, scenes, "test")
    ]


def _engine(
    args: argparse.Namespace,
    root: Path,
    checkpoint: Path,
    head: Path | None,
    batches: dict[int, list[list[LLMGenerationRequest]]],
    device: Device,
) -> Path:
    """Export checkpoint and head, unless an earlier export has the same options.

    An earlier export is an engine directory of this benchmark.
    """
    plan = plan_export(checkpoint, ExportOptions(precision=args.precision, with_draft=False))
    requests = itertools.chain.from_iterable(batches[min(batches)])
    with tempfile.TemporaryDirectory() as texts:
        for name in (TOKENIZER_FILE, TEMPLATE_FILE):
            Path(texts, name).write_bytes(plan.texts[name])
        prompt = max(len(prompt_ids(Path(texts), plan.config, request)) for request in requests)
    settings = list(args.settings.values())
    tree = max((setting.tree_size for setting in settings), default=2)
    drafted = max((setting.drafted_rows for setting in settings), default=1)
    # a round needs the slots of its tree behind those of the queued rounds
    capacity = prompt + args.tokens + tree + 2 * max(setting.tokens_per_round for setting in settings)
    options = {
        "precision": args.precision,
        "max_batch_size": max(batches),
        "max_input_len": prompt,
        "max_kv_cache_capacity": capacity,
        "max_draft_tree_size": max(64, drafted),
        "max_verify_tree_size": min(max(64, tree), capacity - 1),
    }
    stamp = json.dumps({**options, "checkpoint": str(checkpoint.resolve()), "head": str(head)})
    engine = root / "engine"
    if args.checkpoint is None and (engine / STAMP).is_file() and (engine / STAMP).read_text() == stamp:
        EngineConfig.load(engine)
        return engine
    (engine / STAMP).unlink(missing_ok=True)
    export(checkpoint, engine, **options, draft=head)
    if device.name == "tensorrt":
        from edgellm_ros.builder.tensorrt.plan import build_plans

        build_plans(engine, lambda: device)
    (engine / STAMP).write_text(stamp)
    return engine


class _Comparison:
    """Measures all settings on one engine directory."""

    def __init__(self, args: argparse.Namespace, engine: Path, device: Device, clock: StopWatch) -> None:
        self._args = args
        self._device = device
        self._clock = clock
        self._forces = args.checkpoint is None
        self._errors: dict[str, str] = {}
        self._profile = KernelProfile(device.synchronize) if args.profile else None
        self._vanilla = Contender(OFF, engine, device, None, False, args.decode)
        self._drafting: list[Contender] = []
        for name, setting in args.settings.items():
            with self._excusing(name):
                self._drafting.append(Contender(name, engine, device, setting, self._forces, args.decode))
        clock.done("load")

    @contextmanager
    def _excusing(self, name: str) -> Iterator[None]:
        """Note that a setting fails in the block.

        The others are measured without it, but not without OFF.
        """
        try:
            yield
        except (EngineError, RuntimeError, ValueError) as error:
            if name == OFF:
                raise
            self._errors[name] = f"{type(error).__name__}: {error}"
            print(f"{name}: {self._errors[name]}", file=sys.stderr)
            self._drafting = [contender for contender in self._drafting if contender.name != name]

    def results(self, batches: dict[int, list[list[LLMGenerationRequest]]]) -> dict[str, Any]:
        """Measure each batch size.

        The stages come first, because recorded steps have none.
        """
        answers = {batch: self._vanilla.run(groups) for batch, groups in batches.items()}
        self._clock.done("vanilla")
        before = {}
        for contender in self._drafting:
            with self._excusing(contender.name):
                for batch, groups in batches.items():
                    before[contender.name, batch] = self._stages(contender, groups, answers[batch])
        self._clock.done("stages", "synchronised between stages, no graphs")
        graphs = {
            contender.name: self._args.graphs and contender.runtime.record()
            for contender in (self._vanilla, *self._drafting)
        }
        self._clock.done("capture", ", ".join(name for name, done in graphs.items() if done) or "no graphs")
        found = []
        for batch, groups in batches.items():
            found.append(self._measure(batch, groups, answers[batch], before))
            self._clock.done(f"batch_{batch}")
            if self._profile is not None:
                found[-1]["profiles"] = self._profiles(groups, answers[batch], self._profile)
                self._clock.done(f"profile_{batch}")
        for contender in (self._vanilla, *self._drafting):
            contender.runtime.close()
        return {"cuda_graphs": graphs, "errors": self._errors, "batches": found}

    def _profiles(self, groups: Batches, vanilla: Run, profile: KernelProfile) -> dict[str, Any]:
        """Profile a round of each setting, at its highest rate, and a step of "off"."""
        found: dict[str, Any] = {}
        for contender in (self._vanilla, *self._drafting):
            with self._excusing(contender.name):
                self._force(contender, groups, vanilla)
                events = profile_events(contender.runtime, groups[0], profile)
                rows = rows_of(events, PROFILED_STEPS)
                stages = stages_of(events) if contender.drafting else None
                found[contender.name] = {"stages_ms": stages, "kernels": rows}
                print(f"{contender.name}: {stages}", file=sys.stderr)
                print(format_table(rows), file=sys.stderr)
        return found

    def _force(self, contender: Contender, groups: Batches, vanilla: Run, rate: float | None = None) -> None:
        """Force a rate, None = the highest; do nothing where the acceptance is real."""
        kernels = contender.kernels
        if isinstance(kernels, ForcedTreeKernels):
            prompts = [self._args.context for group in groups for _ in group]
            kernels.force(prompts, vanilla.token_ids, rate or self._rates(contender)[-1] or 1.0)

    def _stages(self, contender: Contender, groups: Batches, vanilla: Run) -> dict[str, Any]:
        """Measure stages, and how many of the forced tokens the sampler chooses by itself."""
        found: dict[str, Any] = {}
        kernels = contender.kernels
        if isinstance(kernels, ForcedTreeKernels):
            self._force(contender, groups, vanilla)
            kernels.own_tokens, kernels.forced_tokens, kernels.counts_own_tokens = 0, 0, True
            contender.run(groups)  # the warm-up of the next run
            kernels.counts_own_tokens = False
            found["own_tokens"] = kernels.own_tokens / kernels.forced_tokens
        else:
            contender.run(groups[:1])
        found["stages_ms_synchronised_no_graphs"] = contender.stages(groups[:MOST_STAGE_BATCHES])
        return found

    def _measure(
        self, batch: int, groups: Batches, vanilla: Run, before: dict[tuple[str, int], dict[str, Any]]
    ) -> dict[str, Any]:
        """Measure all settings in turn with one batch size."""
        turns: list[tuple[Contender, float | None]] = [(self._vanilla, None)]
        for contender in self._drafting:
            turns += [(contender, rate) for rate in self._rates(contender)]
        runs: list[list[Run]] = [[] for _ in turns]
        for number in range(WARM_UP_RUNS + self._args.runs):
            for (contender, rate), mine in zip(turns, runs, strict=True):
                if contender.name in self._errors:
                    continue
                with self._excusing(contender.name):
                    self._force(contender, groups, vanilla, rate)
                    run = contender.run(groups)
                    if number >= WARM_UP_RUNS:
                        mine.append(run)
        off, settings = _figures(runs[0]), []
        step_ms = off.pop("round_ms")
        off["step_ms"] = step_ms
        for (contender, rate), mine in zip(turns[1:], runs[1:], strict=True):
            if contender.name in self._errors:
                continue
            figures = _figures(mine)
            figures["times_vanilla"] = off["token_ms"] / figures["token_ms"]
            figures["pays_from"] = figures["round_ms"] / step_ms
            same = [ours == theirs for ours, theirs in zip(mine[0].token_ids, vanilla.token_ids, strict=True)]
            drafting = contender.drafting
            assert drafting is not None
            settings.append(
                {
                    "setting": contender.name,
                    "strategy": drafting.strategy,
                    "tree_size": drafting.tree_size,
                    "acceptance": "real" if rate is None else "forced",
                    "forced_tokens_per_verification": rate,
                    **figures,
                    "answers": len(same),
                    "same_answers": sum(same),
                    **before[contender.name, batch],
                }
            )
            print(_line(batch, settings[-1]), file=sys.stderr)
        return {"batch": batch, "off": off, "settings": settings}

    def _rates(self, contender: Contender) -> list[float | None]:
        """Return the forced rates that a setting can yield; [None] for the real one."""
        assert contender.drafting is not None
        if not self._forces:
            return [None]
        most = contender.drafting.tokens_per_round
        return [rate for rate in self._args.acceptance if rate <= most] or [float(most)]


def _figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Compute medians of the times, and the counters of the last run."""
    last = runs[-1]
    drafts = last.verified_trees > 0
    return {
        "token_ms": 1e3 * median(run.token_s for run in runs),
        "token_ms_of_runs": [1e3 * run.token_s for run in runs],
        "round_ms": 1e3 * median(run.decode_s / run.steps for run in runs),
        "prefill_ms": 1e3 * median(run.prefill_s for run in runs),
        "tokens_per_s": median(run.tokens / run.decode_s for run in runs),
        **({"tokens_per_verification": last.verified_tokens / last.verified_trees} if drafts else {}),
        **({"vanilla_steps": last.vanilla_steps} if drafts else {}),
    }


def _line(batch: int, figures: dict[str, Any]) -> str:
    """Format the figures of a setting; the acceptance is named."""
    return (
        f"batch {batch}, {figures['setting']}: {figures['tokens_per_verification']:.2f} tokens per "
        f"verification ({figures['acceptance']}), {figures['round_ms']:.3f} ms per round, "
        f"{figures['token_ms']:.3f} ms per token, {figures['times_vanilla']:.2f} times vanilla, "
        f"pays from {figures['pays_from']:.2f}"
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add_shape(parser, parse_any, (*SHAPES, *MODELS))
    add("--checkpoint", type=Path, help="real weights in place of a shape; a GGUF file too")
    add("--head", type=Path, help="EAGLE-3 head of the checkpoint (default: its own head)")
    add("--precision", choices=BYTES_PER_VALUE, help="default: fp16 for a shape, fp32 for a checkpoint")
    add("--device", choices=DEVICES, default="cpu", help="device to run on (default: %(default)s)")
    add(
        "--decode",
        choices=DECODES,
        default=AUTO,
        help="what executes decode steps, verifications and drafts: the engine, the fused kernels, or the "
        "faster one (default: %(default)s)",
    )
    add("--batch", type=numbers(integer(1)), default="1", metavar="N[,N...]", help="sizes (default: 1)")
    add(
        "--settings",
        type=_settings,
        default="chain3,tree8/4/16,tree10/6/60",
        help="chainN, mtpN, treeK/N/M (top k, steps, rows of a verification) and lookupN "
        "(default: %(default)s)",
    )
    add(
        "--acceptance",
        type=numbers(_rate),
        default="2,3",
        metavar="X[,X...]",
        help="forced tokens per verification of a shape (default: %(default)s)",
    )
    add("--context", type=integer(2), default=500, metavar="N", help="prompt of a shape (default: 500)")
    add("--scenes", type=integer(1), default=40, metavar="N", help="scenes of a checkpoint (default: 40)")
    add("--prompts", type=Path, help="file with a prompt per line, in place of scenes")
    add("--temperature", type=float, default=0.0, help="of the answers to --prompts (default: 0, greedy)")
    add("--tokens", type=integer(2), default=121, metavar="N", help="most tokens of an answer (default: 121)")
    add("--runs", type=integer(1), default=5, metavar="N", help="timed runs of each setting (default: 5)")
    add("--no-graphs", dest="graphs", action="store_false", help="launch kernels one by one, without graphs")
    add("--profile", action="store_true", help="profile the kernels of rounds; needs a GPU and PyTorch")
    add(
        "--directory",
        type=Path,
        help="directory to keep checkpoint, head and engine in; they are reused (default: temporary)",
    )
    args = parser.parse_args(arguments)
    if args.checkpoint is None and (args.head or args.prompts):
        parser.error("--head and --prompts need --checkpoint")
    if args.profile and (args.checkpoint or args.device == "cpu"):
        parser.error("--profile needs a shape and a GPU (--device cuda or tensorrt)")
    args.precision = args.precision or ("fp32" if args.checkpoint else "fp16")
    return args


def _settings(text: str) -> dict[str, SpecDecodeDraftingConfig]:
    try:
        return {name: parse_setting(name) for name in text.split(",")}
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 1 <= rate < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number from 1, got {text!r}")
    return rate


if __name__ == "__main__":
    main()
