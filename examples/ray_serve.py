# SPDX-License-Identifier: Apache-2.0
"""OpenAI's API behind Ray Serve: `ray_serve.py ENGINE_DIR [REPLICAS]`.

Needs `pip install 'edgellm[serve]' 'ray[serve]'`.
"""

import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from ray import serve

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.serving.openai.limits import Limits
from edgellm_ros.serving.openai.opening import open_app

if len(sys.argv) not in (2, 3):
    sys.exit(__doc__)
ENGINE_DIR = Path(sys.argv[1]).resolve()
REPLICAS = int(sys.argv[2]) if len(sys.argv) > 2 else 2
CORES = 1  # of each replica; on GPUs: num_gpus=1, and device="cuda" for the runtime
REQUESTS = 8  # of each replica at a time; Ray keeps further ones


@serve.deployment(num_replicas=REPLICAS, max_ongoing_requests=REQUESTS, ray_actor_options={"num_cpus": CORES})
@serve.ingress()
class Replica:
    """One runtime with its own copy of the model."""

    def __init__(self, engine_dir: str) -> None:
        self._opened = ExitStack()
        self._runtime = self._opened.enter_context(LLMInferenceRuntime(engine_dir, threads=CORES))
        limits = Limits(max_requests=REQUESTS)
        self._app = self._opened.enter_context(open_app(self._runtime, "model", limits))

    def __serve_build_asgi_app__(self):
        return self._app.asgi

    def check_health(self) -> None:
        """Ray starts a replica again whose health is bad."""
        self._app.check_health()

    def __del__(self) -> None:
        self._opened.close()


serve.start(http_options={"host": "127.0.0.1", "port": 8000})
print(f"{ENGINE_DIR}: {REPLICAS} replicas at http://127.0.0.1:8000/v1, until Ctrl-C", flush=True)
with suppress(KeyboardInterrupt):
    serve.run(Replica.bind(str(ENGINE_DIR)), name="edgellm", blocking=True)
