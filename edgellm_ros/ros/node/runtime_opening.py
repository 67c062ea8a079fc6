# SPDX-License-Identifier: Apache-2.0
"""Opens the runtime according to the parameters, and closes it."""

from __future__ import annotations

from pathlib import Path

from rclpy.impl.rcutils_logger import RcutilsLogger

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.parts import VISUAL
from edgellm_ros.hearing.transcriber import Transcriber
from edgellm_ros.loaded_objects import collect_again, leave_out_of_collections
from edgellm_ros.ros.node.engine_checks import CHECKED, check_before_loading, engine_problem
from edgellm_ros.ros.node.settings.loras import parse_loras
from edgellm_ros.ros.node.settings.parameters import Parameters
from edgellm_ros.runtime.decoding.speculative.drafting_config import drafting_config
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime


def open_runtime(parameters: Parameters, logger: RcutilsLogger) -> LLMInferenceRuntime:
    """Load the engines, the saved prefix cache and the adapters.

    An invalid prefix cache file only causes a warning: its prefixes are computed again. OSError, ValueError
    or EngineError for engines or adapters that cannot be loaded.
    """
    runtime = open_engine(parameters, logger)
    try:
        prepare(runtime, parameters)
        if parameters.cuda_graphs:
            runtime.capture_decoding_cuda_graph()  # with the adapters that were added
    except BaseException:
        runtime.close()
        raise
    leave_out_of_collections()
    return runtime


def open_engine(parameters: Parameters, logger: RcutilsLogger) -> LLMInferenceRuntime:
    """Load the engines and the saved prefix cache, as `open_runtime`."""
    if not parameters.engine_dir:
        raise ValueError("parameter engine_dir is empty: set it to a directory made by `edgellm export`")
    size, config = parameters.prefix_cache_mb, EngineConfig.load(parameters.engine_dir)
    check_before_loading(parameters, config)
    drafting = drafting_config(
        parameters.drafting,
        config,
        parameters.device == "cpu",
        parameters.draft_top_k or None,
        parameters.draft_steps or None,
        parameters.verify_tree_size or None,
    )
    runtime = LLMInferenceRuntime(
        parameters.engine_dir,
        parameters.device,
        prefix_cache_bytes=None if size < 0 else size * 1_000_000,
        drafting=drafting,
        decode=parameters.decode,
        allow_plan_code=parameters.allow_plan_code,
        tool_call_format=parameters.tool_call_format,
        cuda_graphs=parameters.cuda_graphs,
        without=[name for name in parameters.without if name],
    )
    path = parameters.prefix_cache_file
    try:
        if path and Path(path).is_file():
            runtime.load_prefix_cache(path)
    except (OSError, ValueError) as error:
        logger.warning(f"the saved prefix cache is not used (parameter prefix_cache_file): {error}")
    return runtime


def prepare(runtime: LLMInferenceRuntime, parameters: Parameters) -> None:
    """Load the adapters, and set what requests use that name nothing else.

    OSError, ValueError or EngineError for adapters, and for values that the engine cannot plan with.
    """
    blind = runtime.parts.missing(VISUAL)
    if parameters.frames_per_plan > 1 and (runtime.config.video is None or blind):
        reason = blind or "the engine takes no videos"
        raise ValueError(
            f"parameter frames_per_plan is {parameters.frames_per_plan}, but {reason}: set it to 1"
        )
    for name in CHECKED:
        problem = engine_problem(name, getattr(parameters, name), runtime)
        if problem:
            raise ValueError(f"parameter {problem}")
    for name, directory in parse_loras(parameters.loras).items():
        runtime.add_lora(name, directory)
    runtime.set_action_noise_seed(parameters.noise_seed)
    runtime.switch_lora_weights(parameters.lora)


def open_transcriber(parameters: Parameters) -> Transcriber | None:
    """Load the speech engine; None without the parameter.

    OSError, ValueError or EngineError for one that cannot be loaded.
    """
    if not parameters.speech_engine_dir:
        return None
    return Transcriber(
        parameters.speech_engine_dir,
        parameters.device,
        allow_plan_code=parameters.allow_plan_code,
        cuda_graphs=parameters.cuda_graphs,
    )


def close_runtime(runtime: LLMInferenceRuntime, parameters: Parameters, logger: RcutilsLogger) -> None:
    """Save the prefix cache if a file is set, and free the engines.

    May be called twice.
    """
    path = parameters.prefix_cache_file
    try:
        if path and not runtime.closed:
            runtime.save_prefix_cache(path)
    except (OSError, EngineError) as error:
        logger.error(f"the prefix cache is not saved (parameter prefix_cache_file): {error}")
    finally:
        runtime.close()
        collect_again()
