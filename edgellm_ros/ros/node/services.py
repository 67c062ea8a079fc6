# SPDX-License-Identifier: Apache-2.0
"""Services of the node.

~/save_system_prompt waits in the queue of plans, ~/switch_lora and ~/list_loras wait for changes of the
parameter `loras`; the others answer at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.lifecycle import LifecycleNode
from rclpy.task import Future

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.ros.messaging import services_qos
from edgellm_ros.ros.node.metrics import NodeMetrics, runtime_values
from edgellm_ros.ros.node.planning.lora_changes import LoraChanges
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.ros.node.settings.parameters import MAX_INT64
from edgellm_ros.ros.node.worker.job import COMPLETED, Job, Outcome
from edgellm_ros.ros.node.worker.worker import PlanWorker
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.srv import GetMetrics, ListLoras, SaveSystemPrompt, SetNoiseSeed, SwitchLora


class Services:
    """All services of the node except those of its lifecycle and parameters."""

    def __init__(
        self,
        node: LifecycleNode,
        parameters: LiveParameters,
        runtime: LLMInferenceRuntime,
        worker: PlanWorker,
        loras: LoraChanges,
        metrics: NodeMetrics,
        *,
        api_is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make the services.

        api_is_busy: whether requests of OpenAI's API are answered, which no plan waits for.
        """
        self._node = node
        self._parameters = parameters
        self._runtime = runtime
        self._worker = worker
        self._loras = loras
        self._metrics = metrics
        self._api_is_busy = api_is_busy
        qos = services_qos(parameters.current.service_depth)
        self._unanswered = 0  # calls that wait
        self._all_answered = Future()
        # A group of its own: a callback that awaits blocks the other callbacks of its group.
        waiting = ReentrantCallbackGroup()
        self._services = [
            node.create_service(kind, f"~/{name}", callback, qos_profile=qos, callback_group=group)
            for kind, name, callback, group in (
                (SaveSystemPrompt, "save_system_prompt", self._save_system_prompt, waiting),
                (SwitchLora, "switch_lora", self._switch_lora, waiting),
                (ListLoras, "list_loras", self._list_loras, waiting),
                (SetNoiseSeed, "set_noise_seed", self._set_noise_seed, None),
                (GetMetrics, "get_metrics", self._get_metrics, None),
            )
        ]

    def destroy(self) -> None:
        """Remove the services after the worker was closed.

        Calls that wait are answered first.
        """
        if self._unanswered and self._node.executor is not None:
            self._node.executor.create_task(self._destroy_when_answered)
        else:
            self._destroy_now()

    async def _destroy_when_answered(self) -> None:
        await self._all_answered
        self._destroy_now()

    def _destroy_now(self) -> None:
        for service in self._services:
            self._node.destroy_service(service)

    async def _wait_for(self, future: Future) -> Any:
        """Return the result of the future. `destroy` waits meanwhile."""
        self._unanswered += 1
        try:
            return await future
        finally:
            self._unanswered -= 1
            if self._worker.closed and not self._unanswered:
                self._all_answered.set_result(None)

    async def _wait_for_lora_changes(self) -> None:
        """Wait for the changes of the parameter `loras` before this call."""
        last = self._loras.last_waiting
        if last is not None:
            await self._wait_for(last)

    async def _switch_lora(
        self, request: SwitchLora.Request, response: SwitchLora.Response
    ) -> SwitchLora.Response:
        await self._wait_for_lora_changes()
        try:
            self._runtime.switch_lora_weights(request.name)
            response.success = True
        except (ValueError, EngineError) as error:
            response.message = str(error)
        return response

    async def _list_loras(
        self, request: ListLoras.Request, response: ListLoras.Response
    ) -> ListLoras.Response:
        await self._wait_for_lora_changes()
        try:
            response.names = self._runtime.lora_names()
            response.active = self._runtime.active_lora
            response.success = True
        except EngineError as error:
            response.message = str(error)
        return response

    def _set_noise_seed(
        self, request: SetNoiseSeed.Request, response: SetNoiseSeed.Response
    ) -> SetNoiseSeed.Response:
        if request.seed < 0:
            response.message = f"seed must be from 0 to {MAX_INT64}, got {request.seed}"
            return response
        self._runtime.set_action_noise_seed(request.seed)
        response.success = True
        return response

    async def _save_system_prompt(
        self, request: SaveSystemPrompt.Request, response: SaveSystemPrompt.Response
    ) -> SaveSystemPrompt.Response:
        if self._worker.closed:
            response.message = "the node shuts down"
            return response
        if self._worker.is_full():
            response.message = f"{self._worker.waiting} goals wait already (parameter queue_size)"
            return response
        try:
            self._parameters.current.limits.check_text("the system prompt", [request.system_prompt])
        except ValueError as error:
            response.message = str(error)
            return response
        future = Future()

        def on_done(outcome: Outcome) -> None:  # on any thread
            future.set_result(outcome)
            if self._node.executor is not None:
                self._node.executor.wake()

        def execute() -> None:
            if self._api_is_busy():  # the runtime would end those first, and plans would wait
                raise ValueError("requests of OpenAI's API are being answered: call again later")
            runtime, prompt = self._runtime, request.system_prompt
            if request.release:
                runtime.release_system_prompt_kv_cache(prompt, request.lora)
            else:
                runtime.gen_and_save_system_prompt_kv_cache(prompt, request.lora)

        timeout_s = self._parameters.current.plan_timeout
        self._worker.submit_goal(Job(execute, timeout_s, on_done, runs_alone=True))
        outcome = await self._wait_for(future)
        response.success = outcome.reason == COMPLETED
        response.message = outcome.message
        return response

    def _get_metrics(self, request: GetMetrics.Request, response: GetMetrics.Response) -> GetMetrics.Response:
        values = {**self._metrics.values(), **runtime_values(self._runtime)}
        response.names = list(values)
        response.values = list(values.values())
        response.success = True
        return response
