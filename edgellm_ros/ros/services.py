# SPDX-License-Identifier: Apache-2.0
"""The node's services. Each answers at once; none waits for the plan that runs."""

from __future__ import annotations

from rclpy.lifecycle import LifecycleNode

from edgellm_ros.ros.metrics import NodeMetrics, runtime_values
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.srv import GetMetrics, ListLoras, SaveSystemPrompt, SetNoiseSeed, SwitchLora


class Services:
    """~/switch_lora, ~/list_loras, ~/set_noise_seed, ~/save_system_prompt and ~/get_metrics."""

    def __init__(self, node: LifecycleNode, runtime: LLMInferenceRuntime, metrics: NodeMetrics) -> None:
        self.active_lora = ""
        self._node = node
        self._runtime = runtime
        self._metrics = metrics
        self._services = [
            node.create_service(SwitchLora, "~/switch_lora", self._switch_lora),
            node.create_service(ListLoras, "~/list_loras", self._list_loras),
            node.create_service(SetNoiseSeed, "~/set_noise_seed", self._set_noise_seed),
            node.create_service(SaveSystemPrompt, "~/save_system_prompt", self._save_system_prompt),
            node.create_service(GetMetrics, "~/get_metrics", self._get_metrics),
        ]

    def destroy(self) -> None:
        """Take the services down."""
        for service in self._services:
            self._node.destroy_service(service)

    def _switch_lora(self, request: SwitchLora.Request, response: SwitchLora.Response) -> SwitchLora.Response:
        names = sorted(self._runtime.lora_names())
        if request.name and request.name not in names:
            response.message = f"unknown adapter {request.name!r}; loaded are: {', '.join(names) or 'none'}"
            return response
        self.active_lora = request.name
        response.success = True
        return response

    def _list_loras(self, request: ListLoras.Request, response: ListLoras.Response) -> ListLoras.Response:
        response.names = sorted(self._runtime.lora_names())
        response.active = self.active_lora
        response.success = True
        return response

    def _set_noise_seed(
        self, request: SetNoiseSeed.Request, response: SetNoiseSeed.Response
    ) -> SetNoiseSeed.Response:
        try:
            self._runtime.set_action_noise_seed(request.seed)
            response.success = True
        except ValueError as error:
            response.message = str(error)
        return response

    def _save_system_prompt(
        self, request: SaveSystemPrompt.Request, response: SaveSystemPrompt.Response
    ) -> SaveSystemPrompt.Response:
        response.message = "this version cannot keep system prompts: every request computes its own"
        return response

    def _get_metrics(self, request: GetMetrics.Request, response: GetMetrics.Response) -> GetMetrics.Response:
        values = {**self._metrics.values(), **runtime_values(self._runtime)}
        response.names = list(values)
        response.values = list(values.values())
        response.success = True
        return response
