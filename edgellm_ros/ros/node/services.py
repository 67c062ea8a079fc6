# SPDX-License-Identifier: Apache-2.0
"""Services of the node. All answer at once except ~/save_system_prompt, which waits in the plan queue."""

from __future__ import annotations

from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.lifecycle import LifecycleNode
from rclpy.task import Future

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.ros.messaging import services_qos
from edgellm_ros.ros.node.live_parameters import LiveParameters
from edgellm_ros.ros.node.metrics import NodeMetrics, runtime_values
from edgellm_ros.ros.node.parameters import MAX_INT64
from edgellm_ros.ros.node.planner import SystemPrompt
from edgellm_ros.ros.node.worker import COMPLETED, Job, Outcome, PlanWorker
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.srv import GetMetrics, ListLoras, SaveSystemPrompt, SetNoiseSeed, SwitchLora


class Services:
    """~/switch_lora, ~/list_loras, ~/set_noise_seed, ~/save_system_prompt and ~/get_metrics."""

    def __init__(
        self,
        node: LifecycleNode,
        parameters: LiveParameters,
        runtime: LLMInferenceRuntime,
        worker: PlanWorker,
        metrics: NodeMetrics,
    ) -> None:
        self._node = node
        self._parameters = parameters
        self._runtime = runtime
        self._worker = worker
        self._metrics = metrics
        qos = services_qos(parameters.current.service_depth)
        # A group of its own: a callback that awaits blocks the other callbacks of its group.
        waiting = ReentrantCallbackGroup()
        self._unanswered = 0  # calls of ~/save_system_prompt that wait
        self._all_answered = Future()
        self._saving = node.create_service(
            SaveSystemPrompt,
            "~/save_system_prompt",
            self._save_system_prompt,
            qos_profile=qos,
            callback_group=waiting,
        )
        self._services = [
            node.create_service(SwitchLora, "~/switch_lora", self._switch_lora, qos_profile=qos),
            node.create_service(ListLoras, "~/list_loras", self._list_loras, qos_profile=qos),
            node.create_service(SetNoiseSeed, "~/set_noise_seed", self._set_noise_seed, qos_profile=qos),
            node.create_service(GetMetrics, "~/get_metrics", self._get_metrics, qos_profile=qos),
        ]

    def destroy(self) -> None:
        """Remove the services, after the worker was closed. Calls that wait are answered first."""
        for service in self._services:
            self._node.destroy_service(service)
        if self._unanswered and self._node.executor is not None:
            self._node.executor.create_task(self._destroy_saving)
        else:
            self._node.destroy_service(self._saving)

    async def _destroy_saving(self) -> None:
        await self._all_answered
        self._node.destroy_service(self._saving)

    def _switch_lora(self, request: SwitchLora.Request, response: SwitchLora.Response) -> SwitchLora.Response:
        try:
            self._runtime.switch_lora_weights(request.name)
            response.success = True
        except (ValueError, EngineError) as error:
            response.message = str(error)
        return response

    def _list_loras(self, request: ListLoras.Request, response: ListLoras.Response) -> ListLoras.Response:
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
        if self._worker.is_full:
            response.message = f"{self._worker.waiting} goals wait already (parameter queue_size)"
            return response
        future = Future()

        def on_done(outcome: Outcome) -> None:  # on any thread
            future.set_result(outcome)
            if self._node.executor is not None:
                self._node.executor.wake()

        system_prompt = SystemPrompt(request.system_prompt, request.lora)
        self._worker.submit_goal(Job(system_prompt, self._parameters.current.plan_timeout, on_done))
        self._unanswered += 1
        outcome = await future
        self._unanswered -= 1
        if self._worker.closed and not self._unanswered:
            self._all_answered.set_result(None)
        response.success = outcome.reason == COMPLETED
        response.message = outcome.message
        return response

    def _get_metrics(self, request: GetMetrics.Request, response: GetMetrics.Response) -> GetMetrics.Response:
        values = {**self._metrics.values(), **runtime_values(self._runtime)}
        response.names = list(values)
        response.values = list(values.values())
        response.success = True
        return response
