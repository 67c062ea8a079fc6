# SPDX-License-Identifier: Apache-2.0
"""Cost of LoRA inputs without an adapter, of adapters, and of a switch.

Measures
--------
The time per decode step, and its ratio to an engine without LoRA inputs: without an adapter, with one adapter
and with three, alone and in batches of three. Ratios are medians over the runs; each compares two times of
the same run. For a switch: the time of `switch_lora_weights`, and how much longer the next step takes because
it binds other addresses.

Conditions
----------
Decoding only, in this process, engines loaded and warm, ONNX Runtime with one thread per core. The checkpoint
is exported twice, without and with LoRA inputs. Adapters of rank 8 and 16 on all layers have random weights.
All cases take turns in each run, with an answer of --tokens tokens, sampled at a high temperature so that it
does not end early.

Examples
--------
    python -m benchmarks.adapter_cost
    python -m benchmarks.adapter_cost --tokens 50 --runs 10

Last JSON line: `step_ms` and `ratio_to_without` by case, `switch_seconds`, `step_after_switch_seconds`.

"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks import common
from benchmarks.shrinking_batch import endless_request
from edgellm_ros.builder import export, inspect
from edgellm_ros.engine_directory.adapters.lora_inputs import lora_inputs, lora_targets
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams

RANKS = (8, 16)
OPTIONS: dict[str, Any] = {"drafting": "off"}  # a step is one token


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=100, help="tokens per answer (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=25, help="runs of each case (default: %(default)s)")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        export(args.checkpoint, root / "without", max_lora_rank=0)
        export(args.checkpoint, root / "with", max_lora_rank=max(RANKS))
        with (
            LLMInferenceRuntime(root / "without", **OPTIONS) as plain,
            LLMInferenceRuntime(root / "with", **OPTIONS) as adapted,
        ):
            for name, rank in {"a": 8, "b": 16, "c": 16}.items():
                write_adapter(root / name, root / "with", rank)
                adapted.add_lora(name, root / name)
            result = compare(plain, adapted, args.tokens, args.runs)
            result["switch_seconds"], result["step_after_switch_seconds"] = switch(adapted)
    changes = {**common.changed(OPTIONS), "max_lora_rank": f"0 and {max(RANKS)}"}
    return common.finish("adapter_cost", changes=changes, tokens=args.tokens, **result)


def compare(
    plain: LLMInferenceRuntime, adapted: LLMInferenceRuntime, tokens: int, runs: int
) -> dict[str, Any]:
    """Measure milliseconds per decode step in each case.

    Also returns ratios to the engine without LoRA inputs at the same batch size.
    """
    one = endless_request(plain, tokens)
    requests = {"": one}
    for name in "abc":
        adapted.switch_lora_weights(name)
        requests[name] = replace(endless_request(adapted, tokens), lora=name)
    adapted.switch_lora_weights("")
    cases = {
        "without": (plain, [one]),
        "none_bound": (adapted, [one]),
        "rank_8": (adapted, [requests["a"]]),
        "rank_16": (adapted, [requests["b"]]),
        "three_without": (plain, [one] * 3),
        "three_none_bound": (adapted, [one] * 3),
        "three_rank_8": (adapted, [requests["a"]] * 3),
        "three_different": (adapted, [one, requests["a"], requests["b"]]),
    }
    steps: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(runs):
        for name, (runtime, batch) in cases.items():
            seconds = runtime.handle_request(batch)[0].metrics["decode_s"]
            steps[name].append(seconds / (tokens - 1))
    ratios = {}
    for name, values in steps.items():
        base = steps["three_without" if name.startswith("three") else "without"]
        ratios[name] = statistics.median(a / b for a, b in zip(values, base, strict=True))
    milliseconds = {name: 1e3 * statistics.median(values) for name, values in steps.items()}
    return {"step_ms": milliseconds, "ratio_to_without": ratios}


def switch(runtime: LLMInferenceRuntime, runs: int = 200) -> tuple[float, float]:
    """Measure a switch, and how much longer a short request takes after it.

    Returns two medians in seconds.
    """
    one = LLMGenerationRequest("stop", sampling=SamplingParams(max_tokens=2))
    switches: list[float] = []
    requests: dict[bool, list[float]] = {True: [], False: []}
    for run in range(runs):
        for changed in (True, False):
            start = time.perf_counter()
            runtime.switch_lora_weights("bc"[run % 2])  # both of rank 16
            switched = time.perf_counter()
            runtime.handle_request(one)
            switches.append(switched - start)
            requests[changed].append(time.perf_counter() - switched)
    runtime.switch_lora_weights("")
    longer = [a - b for a, b in zip(requests[True], requests[False], strict=True)]
    return statistics.median(switches), statistics.median(longer)


def write_adapter(directory: Path, engine: Path, rank: int) -> None:
    """Write a PEFT adapter with small random weights for all layers with LoRA inputs."""
    rng = np.random.default_rng(rank)
    inputs = {binding.name: binding.shape for binding in inspect(engine).parts[0].inputs}
    tensors = {}
    for module, (fan_in, fan_out) in lora_targets(lora_inputs(inputs)).items():
        for matrix, shape in (("A", (rank, fan_in)), ("B", (fan_out, rank))):
            values = 0.05 * rng.standard_normal(shape)
            tensors[f"base_model.model.{module}.lora_{matrix}.weight"] = values.astype(np.float32)
    directory.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")


if __name__ == "__main__":
    main()
