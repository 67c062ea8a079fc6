# SPDX-License-Identifier: Apache-2.0
"""`edgellm generate --requests`: a file of requests in, a file of answers out.

Requests run in batches of the engine's largest size. A request that cannot be answered keeps its place with
its error, and does not keep others from their answers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_ros.atomic_file import write_atomically
from edgellm_ros.cli import arguments
from edgellm_ros.cli.requests.answer_output import to_json
from edgellm_ros.cli.requests.request_files import read_request_list, request_fields
from edgellm_ros.cli.requests.request_options import common_fields, lora_dirs, sampling_params
from edgellm_ros.messages.engine_readers import file_readers
from edgellm_ros.strict_json import strict_json

if TYPE_CHECKING:
    from edgellm_ros.engine_directory.config import EngineConfig
    from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
    from edgellm_ros.runtime.request import LLMGenerationRequest

    Batch = dict[int, LLMGenerationRequest]  # by index in the file

SOME_FAILED = 1


def answer_file(args: argparse.Namespace) -> int:
    """Answer the requests of args.requests and write the answers to args.out.

    Returns the exit code.
    """
    from edgellm_ros.engine_directory.config import EngineConfig
    from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime

    config = EngineConfig.load(args.engine_dir)
    requests = read_request_list(args.requests)
    if not Path(args.out).absolute().parent.is_dir():
        raise FileNotFoundError(f"{args.out}: its folder does not exist")
    answers: dict[int, dict[str, Any]] = {}
    adapters, unknown = _adapters(args, requests)
    options = {**arguments.runtime_options(args, config), "tool_call_format": args.tool_call_format}
    with LLMInferenceRuntime(args.engine_dir, lora_dirs=adapters, **options) as runtime:
        for batch in _batches(requests, args, config, unknown, answers):
            answers |= _answer(runtime, batch, args.requests)
    ordered = [answers[index] for index in range(len(requests))]
    write_atomically(Path(args.out), strict_json(ordered, indent=1).encode() + b"\n")
    failed = sum("error" in answer for answer in ordered)
    summary: dict[str, Any] = {"requests": len(ordered), "failed": failed, "out": args.out}
    if options["drafting"] is not None:
        summary["tokens_per_verification"] = runtime.spec_decode_generation_metrics.tokens_per_verification
    if args.json:
        arguments.print_json(summary)
    print(f"[{len(ordered)} requests, {failed} failed; answers in {args.out}]", file=sys.stderr)
    return SOME_FAILED if failed else 0


def _batches(
    requests: list[Any],
    args: argparse.Namespace,
    config: EngineConfig,
    unknown: Mapping[str, Exception],
    answers: dict[int, dict[str, Any]],
) -> Iterator[Batch]:
    """Make batches of valid requests, in order; errors of others go to `answers`.

    unknown: why adapters cannot be used, by name.
    """
    batch: Batch = {}
    for index, data in enumerate(requests):
        where = f"{args.requests}[{index}]"
        try:
            request = _make_request(data, where, args, config)
        except (ValueError, OSError) as error:
            answers[index] = _failure(error)
        else:
            if request.lora in unknown:
                answers[index] = _failure(unknown[request.lora], where)
            else:
                batch[index] = request
        if len(batch) == config.builder.max_batch_size:
            yield batch
            batch = {}
    if batch:
        yield batch


def _make_request(
    data: Any, where: str, args: argparse.Namespace, config: EngineConfig
) -> LLMGenerationRequest:
    from edgellm_ros.runtime.request import LLMGenerationRequest

    fields = request_fields(data, where, args.requests, file_readers(args.engine_dir, config))
    try:
        sampling = sampling_params(args, fields.pop("sampling"))
        return LLMGenerationRequest(**{**common_fields(args, config), **fields, "sampling": sampling})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


def _answer(runtime: LLMInferenceRuntime, batch: Batch, path: str) -> dict[int, dict[str, Any]]:
    """Answer a batch; if it is refused, answer its requests one by one.

    path: of the file of requests, for errors.
    """
    from edgellm_ros.engine.errors import EngineError

    requests = list(batch.values())
    try:
        responses = runtime.handle_request(requests)
    except (ValueError, EngineError) as error:
        if len(batch) == 1:
            return {index: _failure(error, f"{path}[{index}]") for index in batch}
        alone = [_answer(runtime, {index: request}, path) for index, request in batch.items()]
        return {index: answer for answers in alone for index, answer in answers.items()}
    return {
        index: to_json(response, request.logprobs > 0)
        for (index, request), response in zip(batch.items(), responses, strict=True)
    }


def _adapters(args: argparse.Namespace, requests: list[Any]) -> tuple[dict[str, Path], dict[str, Exception]]:
    """Return the adapters that the option and the requests name.

    Also why others that requests name cannot be used, by name.
    """
    from edgellm_ros.runtime.adapters.lora import find_adapter

    adapters = lora_dirs(args.lora, args.engine_dir)
    unknown: dict[str, Exception] = {}
    for data in requests:
        name = data.get("lora") if isinstance(data, Mapping) else None
        if isinstance(name, str) and name not in adapters:
            try:
                directory = find_adapter(args.engine_dir, name, "lora")
            except (ValueError, OSError) as error:
                unknown[name] = error
                continue
            if directory is not None:
                adapters[name] = directory
    return adapters, unknown


def _failure(error: Exception, where: str = "") -> dict[str, Any]:
    """Return the answer of a request that failed.

    where: the request's place, if the error does not name it.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return {"error": f"{where}: {text}" if where else text}
