# SPDX-License-Identifier: Apache-2.0
"""Time of speech to text: transcripts beside transformers, answers of the node.

Measures
--------
With --shape, seconds of one transcript on the path of `edgellm transcribe`: `Transcriber` on an
LLMInferenceRuntime.

- total: from the sound to the transcript. times_real_time: seconds of sound per second of the median total.
- encoder: log-mel features and audio encoder. prefill: the prompt and its first token. token: decode, per
  token after the first. processor: processor time of all threads.
- transformers: the same for `Qwen3ASRForConditionalGeneration.generate`, eager, on the same weights and
  sounds: fp32 and bf16 on a CPU, fp16 on a GPU. Its prompt is given as tokens. `same_tokens`: the number of
  equal tokens before the first difference, the minimum over all sounds. A weak check: answers of random
  weights often repeat one token, and rounding makes them diverge where two logits are almost equal.

With --node, the delay from the end of a spoken command to the first word of the answer, through the node:

- utterance: from the last loud sample of the speech to `~/utterance`; most of it is the silence that ends an
  utterance (`utterance.hang_over`). transcript: to the final `~/transcript`. word: to the first text on
  `~/text_stream`. total: their sum.
- commands without these times: `unheard` (no utterance or transcript), `early` (a pause ended the utterance
  within the command), `not_obeyed` (the rule for transcripts), `no_word`. transcripts_right: those with
  the words of the command, capitals and punctuation aside.

Median and 90th percentile of --runs transcripts after 3 to warm up, or of --runs commands after 2.

Conditions
----------
With --shape, weights are random, at the published sizes, written as a checkpoint and exported by the real
exporter. Each repetition has another sound, since encoded sounds are cached; ours and transformers take turns
in one process, with as many threads. On a CPU with other load only the processor time with `--threads 1` can
be trusted: a busy core makes the threads of PyTorch wait for each other. The language is not forced. An
answer has exactly --tokens tokens: the stop token's logit is never the largest, and the request's limit is
--tokens in place of the 512 of `edgellm transcribe`.

With --node, a person of the split "test" says the command of another episode each time, in a noisy room. The
recording is published in chunks of 40 ms in real time, each when its last sample is due, beside a camera
frame and odometry every 120 ms. Times are of messages that arrive in the benchmark's process. It needs ROS
and espeak-ng. --obey-all: for engines with random weights, whose words are never sure.

Examples
--------
    python -m benchmarks.speech --shape qwen3-asr-0.6b --quantize int8 --cpu-int8
    python -m benchmarks.speech --shape qwen3-asr-1.7b --precision fp16 --device cuda
    python -m benchmarks.speech --shape qwen3-asr-0.6b,num_hidden_layers=2,encoder_layers=2 --no-transformers
    python -m benchmarks.speech --node --speech-engine engines/speech

Last JSON line: the options, the load average, and with --shape `ours` and `transformers` (by precision), each
with the medians and 90th percentiles in ms, `sounds_encoded` (all of them, with those to warm up), and
`seconds` by phase; with --node the figures in ms.

"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.common import StopWatch
from benchmarks.model_shapes import add_shape
from benchmarks.speech_shapes import SPEECH_SHAPES, parse_speech_shape, write_speech_checkpoint
from edgellm_ros.builder import export
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.cli.arguments import integer
from edgellm_ros.engine.device import open_device
from edgellm_ros.engine.onnxruntime.session import available_cores
from edgellm_ros.engine_directory.choices import PRECISIONS, ROUNDINGS
from edgellm_ros.hearing.transcriber import Transcriber
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from edgellm_ros.runtime.transcript import read_transcript, transcription_request

WARM_UP = 3
RATE = 16000
ROWS_PER_SECOND = 13  # of the audio encoder
PROMPT = 16  # tokens around a sound, less than this
STAGES = ("total", "encoder", "prefill", "token", "processor")
PRECISIONS_OF_TRANSFORMERS = {"cpu": ("fp32", "bf16"), "cuda": ("fp16",)}

Answer = tuple[list[int], dict[str, float]]  # tokens, and seconds by stage


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    args = parse(arguments)
    if args.node:
        from benchmarks.speech_node import measure_node  # needs ROS

        return measure_node(args)
    clock, device = StopWatch(), open_device(args.device)
    with tempfile.TemporaryDirectory() as temporary:
        root = args.directory or Path(temporary)
        checkpoint = write_speech_checkpoint(root / "checkpoint", args.shape)
        clock.done("checkpoint", f"{args.shape.parameters / 1e9:.3f} billion weights")
        options, sizes = export_options(args)
        export(checkpoint, root / "engine", options)
        clock.done("export")
        runtime: dict[str, Any] = {"threads": args.threads}
        with Transcriber(root / "engine", args.device, **runtime) as transcriber:
            clock.done("load")
            found = _measure(args, transcriber, checkpoint, clock)
    return common.finish(
        "speech",
        changes=common.changed(runtime) | sizes | {"max_tokens": args.tokens},
        shape=asdict(args.shape),
        parameters=args.shape.parameters,
        precision=args.precision,
        quantize=args.quantize,
        cpu_int8=args.cpu_int8,
        device=args.device,
        **common.machine(device),
        sound_s=args.seconds,
        tokens=args.tokens,
        runs=args.runs,
        threads=args.threads or available_cores(),
        **found,
        load_average=os.getloadavg()[0],
        seconds=clock.seconds,
    )


def export_options(args: argparse.Namespace) -> tuple[ExportOptions, dict[str, int]]:
    """Return the options of the export, and the sizes that are not the defaults.

    A default that is too short for the prompt or the answer grows.
    """
    options = ExportOptions(precision=args.precision, quantize=args.quantize, cpu_int8=args.cpu_int8)
    prompt = PROMPT + int(np.ceil(args.seconds * ROWS_PER_SECOND))
    needed = {"max_input_len": prompt, "max_kv_cache_capacity": prompt + args.tokens}
    sizes = {name: size for name, size in needed.items() if size > getattr(options, name)}
    return replace(options, **sizes), sizes


def _measure(
    args: argparse.Namespace, transcriber: Transcriber, checkpoint: Path, clock: StopWatch
) -> dict[str, Any]:
    """Return the figures of both sides, which transcribe in turns."""
    theirs: dict[str, Any] = {}
    versions: dict[str, str] = {}
    if args.transformers and all(map(importlib.util.find_spec, ("torch", "transformers"))):
        import torch
        import transformers

        from benchmarks.transformers_speech import TransformersTranscriber

        versions = {"transformers_version": transformers.__version__, "torch_version": torch.__version__}
        for precision in PRECISIONS_OF_TRANSFORMERS[args.device]:
            theirs[precision] = TransformersTranscriber(
                checkpoint, precision, args.device, args.threads or available_cores()
            )
            clock.done(f"transformers_load_{precision}")
    ours: list[dict[str, float]] = []
    others: dict[str, list[dict[str, float]]] = {precision: [] for precision in theirs}
    same = dict.fromkeys(theirs, args.tokens)
    for run in range(-WARM_UP, args.runs):
        sound = make_sound(args.seconds, seed=run + WARM_UP)
        request = transcript_request(sound, args.tokens)
        tokens, seconds = _measured(lambda: transcribe(transcriber, request))  # noqa: B023
        ours.append(seconds)
        prompt = transcriber.runtime.pipeline.prepare([request], noise_seed=0)[0].token_ids
        for precision, model in theirs.items():
            expected, seconds = _measured(lambda: model.answer(prompt, sound.samples, args.tokens))  # noqa: B023
            others[precision].append(seconds)
            same[precision] = min(same[precision], _equal(tokens, expected))
        if run == -1:
            clock.done("warm_up")
    clock.done("transcripts")
    figures = _figures("ours", ours[WARM_UP:], args.seconds, clock)
    return {
        "sounds_encoded": transcriber.runtime.multimodal_metrics.total_sounds,
        "ours": figures,
        "transformers": {
            precision: _figures(f"transformers {precision}", times[WARM_UP:], args.seconds, clock)
            | {"same_tokens": same[precision]}
            for precision, times in others.items()
        }
        or None,
        **versions,
    }


def _measured(transcribe: Callable[[], Answer]) -> Answer:
    """Add the processor time to the seconds of an answer."""
    start = time.process_time()
    tokens, seconds = transcribe()
    return tokens, seconds | {"processor_s": time.process_time() - start}


def make_sound(seconds: float, seed: int) -> Sound:
    """Make a sound of changing tones and noise; another for each seed."""
    rng = np.random.default_rng(seed)
    time_s = np.arange(round(seconds * RATE)) / RATE
    samples = 0.05 * rng.standard_normal(len(time_s))
    for pitch, rhythm in zip(rng.uniform(100, 3000, 6), rng.uniform(1, 5, 6), strict=True):
        samples += 0.05 * np.sin(2 * np.pi * pitch * time_s) * (1 + np.sin(2 * np.pi * rhythm * time_s))
    return Sound(samples.astype(np.float32), RATE)


def transcript_request(sound: Sound, tokens: int) -> LLMGenerationRequest:
    """Make the request of `edgellm transcribe`, with another limit of tokens."""
    request = transcription_request([sound])
    return replace(request, sampling=SamplingParams(**{**asdict(request.sampling), "max_tokens": tokens}))


def transcribe(transcriber: Transcriber, request: LLMGenerationRequest) -> Answer:
    """Return the tokens of a transcript and seconds by stage."""
    start = time.perf_counter()
    response = transcriber.runtime.handle_request(request)
    read_transcript(response, transcriber.runtime.config)
    total = time.perf_counter() - start
    count, stages = len(response.token_ids), response.metrics
    if count != request.sampling.max_tokens:
        raise RuntimeError(f"the transcript has {count} tokens, expected {request.sampling.max_tokens}")
    seconds = {"encoder_s": stages["audio_s"], "prefill_s": stages["prefill_s"]}
    return response.token_ids, {"total_s": total, **seconds, "token_s": stages["decode_s"] / (count - 1)}


def _figures(name: str, times: list[dict[str, float]], sound_s: float, clock: StopWatch) -> dict[str, Any]:
    """Return the spread of each stage in ms, and report the medians."""
    found: dict[str, Any] = {
        f"{stage}_ms": common.spread([1e3 * seconds[f"{stage}_s"] for seconds in times]) for stage in STAGES
    }
    found["times_real_time"] = 1e3 * sound_s / found["total_ms"]["median"]
    shown = ", ".join(
        f"{stage} {found[f'{stage}_ms']['median']:.2f} ms (p90 {found[f'{stage}_ms']['p90']:.2f})"
        for stage in STAGES
    )
    clock.note(f"{name}: {shown}, {found['times_real_time']:.2f} times real time")
    return found


def _equal(ours: list[int], theirs: list[int]) -> int:
    """Return the number of equal tokens before the first difference."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((index for index, (one, other) in pairs if one != other), len(ours))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add_shape(parser, parse_speech_shape, SPEECH_SHAPES, default="qwen3-asr-0.6b")
    add("--precision", choices=PRECISIONS, default="fp32", help="of the engine (default: %(default)s)")
    add("--quantize", choices=ROUNDINGS, help="round the weights of the layers, as `edgellm export` does")
    add("--cpu-int8", action="store_true", help="multiply in 8 bits on a CPU, as `edgellm export` does")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="device (default: %(default)s)")
    add("--threads", type=integer(0), default=0, help="of each side on a CPU; 0 = one per core (default)")
    add("--seconds", type=_seconds, default=5.0, help="of sound (default: %(default)s)")
    add("--tokens", type=integer(2), default=20, help="of a transcript (default: %(default)s)")
    add("--runs", type=integer(1), default=20, help="timed transcripts or commands (default: %(default)s)")
    add("--no-transformers", dest="transformers", action="store_false", help="do not run transformers")
    add(
        "--directory",
        type=Path,
        help="directory to keep checkpoint and engine in; the checkpoint is reused (default: temporary)",
    )
    add("--node", action="store_true", help="measure answers of the node, in place of a shape's transcripts")
    add("--speech-engine", type=Path, metavar="DIR", help="with --node: engine that writes transcripts")
    add("--engine", type=Path, metavar="DIR", help="with --node: engine that answers (default: the demo's)")
    add("--obey-all", action="store_true", help="with --node: obey unsure words too")
    args = parser.parse_args(arguments)
    if args.node != (args.speech_engine is not None):
        parser.error("--node needs --speech-engine, and --speech-engine needs --node")
    return args


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 60:
        raise argparse.ArgumentTypeError(f"expected seconds from 0.1 to 60, got {text}")
    return value


if __name__ == "__main__":
    main()
