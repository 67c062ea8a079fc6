# SPDX-License-Identifier: Apache-2.0
"""Time to the words of a plan on a CPU, beside transformers' `generate`.

Measures
--------
- ours: `handle_request` of a camera frame and a command without a trajectory: resize, vision, prefill, and
  decode with the draft head (`--drafting`).
- transformers: `generate` of the same checkpoint in fp32, with the same prompt and pixels. Its tokenizer and
  its image processor are not counted.

For each of --engines and both: the median of the wall time and of the processor time of all threads, and how
many times as fast as transformers (ratios of the medians). On a machine with other load only the processor
time with `--threads 1` can be trusted: a busy core makes the threads of PyTorch wait for each other.

Conditions
----------
Batch 1, greedy, no prefix reuse, everything warm. Each request is the first frame of another episode;
transformers and the engines take turns in one process. `equal`: answers with the tokens of transformers.
Needs PyTorch and transformers (requirements-parity.txt).

Examples
--------
    python -m benchmarks.plan_words
    python -m benchmarks.plan_words --engines engines/arena,engines/arena-int8 --threads 1

Last JSON line: `transformers` and `engines`, by directory.

"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import common
from edgellm_ros.engine.onnxruntime.session import available_cores
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams

MAX_TOKENS = 64
WARM_UP = 3


class TransformersAnswers:
    """Answers of a checkpoint by transformers, in fp32 on the CPU."""

    def __init__(self, checkpoint: Path, stop_token_ids: tuple[int, ...], threads: int) -> None:
        import torch
        from transformers import AutoImageProcessor, AutoModelForMultimodalLM, logging

        logging.set_verbosity_error()  # the config has an audio tower, the weights need not
        torch.set_num_threads(threads)
        self._torch = torch
        model = AutoModelForMultimodalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._model = model.eval().requires_grad_(False)
        self._processor = AutoImageProcessor.from_pretrained(checkpoint)
        self._stops = list(stop_token_ids)

    def inputs(self, prompt: list[int], image: np.ndarray) -> dict[str, Any]:
        """Return what `answer` takes.

        The prompt has one placeholder for each row of the image.
        """
        ids = self._torch.tensor([prompt])
        pixels = self._processor(images=[image], return_tensors="pt")
        return {"input_ids": ids, "attention_mask": self._torch.ones_like(ids), **pixels}

    def answer(self, inputs: dict[str, Any]) -> list[int]:
        """Return the tokens of the greedy answer."""
        found = self._model.generate(
            **inputs, max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=self._stops, pad_token_id=0
        )
        return found[0, inputs["input_ids"].shape[1] :].tolist()


class Times:
    """Wall time and processor time of calls."""

    def __init__(self) -> None:
        self._wall: list[float] = []
        self._processor: list[float] = []
        self.equal = 0

    def measured(self, call: Callable[[], list[int]], counts: bool) -> list[int]:
        """Return what the call returns; counts: whether its times do."""
        wall, processor = time.perf_counter(), time.process_time()
        tokens = call()
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        if counts:
            self._wall.append(wall)
            self._processor.append(processor)
        return tokens

    def result(self) -> dict[str, float]:
        """Return the medians in ms."""
        return {"wall_ms": 1e3 * median(self._wall), "processor_ms": 1e3 * median(self._processor)}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__)
    common.add_engines(parser)
    parser.add_argument("--plans", type=int, default=40, help="number of plans (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="of each side; 0 = one per core (default)")
    parser.add_argument("--drafting", default="auto", help="of the engines (default: %(default)s)")
    args = parser.parse_args(arguments)
    threads = args.threads or available_cores()
    folders = common.engines(args)
    options: dict[str, Any] = {"threads": threads, "prefix_cache_bytes": 0, "drafting": args.drafting}
    runtimes = {folder: LLMInferenceRuntime(folder, **options) for folder in folders}
    first = next(iter(runtimes.values()))
    theirs = TransformersAnswers(args.checkpoint, first.config.stop_token_ids, threads)
    times: dict[str, Times] = {folder: Times() for folder in folders}
    reference = Times()
    for number in range(-WARM_UP, args.plans):
        request = words_of_a_plan(common.SEED + abs(number))
        prompt = first.pipeline.prepare([request], noise_seed=0)[0].token_ids
        inputs, counts = theirs.inputs(prompt, request.images[0]), number >= 0
        expected = reference.measured(lambda: theirs.answer(inputs), counts)  # noqa: B023
        for folder, runtime in runtimes.items():
            tokens = times[folder].measured(
                lambda: runtime.handle_request(request).token_ids,  # noqa: B023
                counts,
            )
            times[folder].equal += counts and list(tokens) == expected
    base = reference.result()
    engines = {}
    for folder, found in times.items():
        result = found.result()
        ratios = {key.replace("_ms", "_times_as_fast"): base[key] / result[key] for key in result}
        engines[folder] = {**result, **ratios, "equal": found.equal}
    return common.finish(
        "plan_words",
        changes=common.changed(options),
        plans=args.plans,
        threads=threads,
        transformers=base,
        engines=engines,
    )


def words_of_a_plan(seed: int) -> LLMGenerationRequest:
    """Make the first request of an episode for words alone."""
    return common.first_look(seed, action_samples=0, sampling=SamplingParams(max_tokens=MAX_TOKENS))


if __name__ == "__main__":
    main()
