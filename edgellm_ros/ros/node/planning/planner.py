# SPDX-License-Identifier: Apache-2.0
"""Makes one plan: from what the robot sees and a command to text and trajectories.

Runs on the planning threads, the only threads that block.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from typing import Any

import numpy as np
from rclpy.node import Node
from std_msgs.msg import Header

from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.echo import printable
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.parts import ACTION, AUDIO
from edgellm_ros.interruptible import InterruptedWorkError, interruptible
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.multimodal.video import Video
from edgellm_ros.ros.node.messages import to_action_chunks, to_generation
from edgellm_ros.ros.node.plan import Motion, Plan
from edgellm_ros.ros.node.planning.chunking import Chunking
from edgellm_ros.ros.node.planning.plan_inputs import PlanInputs
from edgellm_ros.ros.node.planning.plan_request import PlanRequest
from edgellm_ros.ros.node.sensors.input_time import StaleInputError
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.ros.node.worker.job import CANCELLED, COMPLETED, ERROR, STALE_INPUT, Job, Outcome
from edgellm_ros.runtime.adapters.lora import canonical_name
from edgellm_ros.runtime.conversation import (
    USER,
    AudioPart,
    ImagePart,
    Message,
    TextPart,
    VideoPart,
)
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse, SamplingParams


class Planner:
    """Runs jobs whose request is a `PlanRequest`, or a function; thread-safe.

    A function does other work with the runtime.
    """

    def __init__(
        self,
        node: Node,
        parameters: LiveParameters,
        runtime: LLMInferenceRuntime,
        inputs: PlanInputs,
        chunking: Chunking,
    ) -> None:
        self._parameters = parameters
        self._runtime = runtime
        self._inputs = inputs
        self._chunking = chunking
        self._logger = node.get_logger()

    def plan(self, job: Job) -> Outcome:
        """Plan one job, on any thread. Errors become outcomes."""
        try:
            return self._plan(job)
        except StaleInputError as error:
            return Outcome(STALE_INPUT, str(error))
        except InterruptedWorkError:
            return job.stopped or Outcome(CANCELLED, "cancelled")
        except (ValueError, OSError, EngineError) as error:
            return Outcome(ERROR, str(error))
        except Exception as error:
            self._logger.error(traceback.format_exc())
            text = printable(f"{type(error).__name__}: {error}")
            return Outcome(ERROR, f"internal error, see the node's log: {text}")

    def _plan(self, job: Job) -> Outcome:
        if not isinstance(job.request, PlanRequest):
            job.request()
            return Outcome(COMPLETED)
        request = job.request
        sampling = _sampling(job)
        sounds = self._sounds(request)
        samples = self._samples(request)
        seen = self._inputs.observe(request, drives=samples > 0)
        lora = canonical_name(request.lora or self._runtime.active_lora)
        motion = Motion(request.instruction, lora, seen.start)
        response = self._answer(
            job,
            LLMGenerationRequest(
                **self._prompt(request, seen.images, seen.video, sounds),
                **seen.fields,
                navigation=request.navigation,
                guidance=request.guidance if request.navigation and samples else None,
                lora=request.lora,
                sampling=sampling,
                action_samples=samples,
                noise_seed=request.noise_seed,
                denoise_steps=request.denoise_steps,
                tools=request.tools() if request.tools is not None else None,
                on_progress=job.report,
                cancel=job.cancel,
                previous_chunk=self._previous_chunk(request, motion, samples),
            ),
        )
        motion = dataclasses.replace(motion, lora=response.lora)
        plan = self._to_messages(job, response, seen.header, seen.frame, motion)
        if response.finish_reason == CANCELLED:
            stopped = job.stopped or Outcome(CANCELLED, "cancelled")
            return Outcome(stopped.reason, stopped.message, plan)
        return Outcome(COMPLETED, "", plan)

    def _answer(self, job: Job, request: LLMGenerationRequest) -> LLMGenerationResponse:
        """Wait for the runtime's answer, at the level of the job, which may rise.

        At the job's deadline the job is stopped and the answer ends. InterruptedWorkError if the answer had
        not begun.
        """
        handle = self._runtime.submit(request, priority=job.level, deadline=job.deadline)
        job.on_raised = handle.raise_priority
        handle.raise_priority(job.level)  # it may have risen before
        try:
            return handle.result()
        except TimeoutError:
            raise InterruptedWorkError from None
        finally:
            job.on_raised = lambda level: None  # the handle would keep the answer in memory
            job.check_time()

    def _samples(self, request: PlanRequest) -> int:
        """Return the chunks to sample; 0 if the action head is missing."""
        if self._runtime.parts.missing(ACTION):
            return 0
        return max(self._runtime.config.min_action_samples, request.action_samples)

    def _prompt(
        self,
        request: PlanRequest,
        images: tuple[np.ndarray, ...],
        video: Video | None,
        sounds: tuple[Sound, ...],
    ) -> dict[str, Any]:
        """Return the prompt's fields: messages after earlier ones, else the short form.

        A video takes the place of the images.
        """
        videos = () if video is None else (video,)
        images = () if videos else images
        if request.earlier_messages is None:
            return {
                "prompt": request.prompt,
                "system_prompt": request.system_prompt,
                "images": images,
                "videos": videos,
                "audio": sounds,
            }
        self._runtime.config.check_answers_with_text("a goal with earlier_messages")
        system = [Message("system", request.system_prompt)] if request.system_prompt else []
        vision = (*map(ImagePart, images), *map(VideoPart, videos))
        content = (*vision, *map(AudioPart, sounds), TextPart(request.prompt))
        return {"messages": (*system, *request.earlier_messages(), Message(USER, content))}

    def _sounds(self, request: PlanRequest) -> tuple[Sound, ...]:
        if request.sound is None:
            return ()
        missing = self._runtime.parts.missing(AUDIO)
        if missing:
            raise ValueError(f"{missing}, the request has audio")
        return (request.sound(),)

    def _previous_chunk(self, request: PlanRequest, motion: Motion, samples: int) -> ChunkCondition | None:
        """Return the chunk to continue: the request's, else by the parameter `chunking`.

        Without samples the request's chunk is checked only.
        """
        action = self._runtime.config.action
        if request.previous_chunk is not None and action is not None:
            return request.previous_chunk(action.action_space)
        return self._chunking.condition(motion) if samples else None

    def _to_messages(
        self,
        job: Job,
        response: LLMGenerationResponse,
        header: Header,
        frame: np.ndarray | None,
        motion: Motion,
    ) -> Plan:
        request: PlanRequest = job.request
        now = time.monotonic()
        generation = to_generation(
            response, header, request.request_id, job.started - job.arrival, now - job.arrival
        )
        action = self._runtime.config.action
        base = Header(stamp=header.stamp, frame_id=self._parameters.current.frame_id)
        if action is None or response.actions is None:
            return Plan(
                generation=generation,
                base=base,
                action_chunks=[],
                states=None,
                frame=frame,
                motion=motion,
            )
        return Plan(
            generation=generation,
            base=base,
            action_chunks=to_action_chunks(response, action.action_space, base, request.request_id),
            states=response.paths,
            frame=frame,
            motion=motion,
        )


def _sampling(job: Job) -> SamplingParams:
    """Return the sampling parameters of a job's plan.

    InterruptedWorkError if the job is stopped before.
    """
    request: PlanRequest = job.request

    def stopped() -> bool:
        job.check_time()
        return job.cancel.is_set()

    return interruptible(request.sampling, stopped) if request.has_grammar else request.sampling()
