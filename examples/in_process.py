# SPDX-License-Identifier: Apache-2.0
"""Plan in this process, without ROS: `in_process.py ENGINE_DIR IMAGE`."""

import sys

import cv2

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest

engine_dir, image = sys.argv[1:]
frame = cv2.cvtColor(cv2.imread(image), cv2.COLOR_BGR2RGB)

with LLMInferenceRuntime(engine_dir) as runtime:
    response = runtime.handle_request(
        LLMGenerationRequest("go to the red box", images=(frame,), action_samples=4, noise_seed=1)
    )
print(response.text)
if response.paths is not None:  # the model decided to drive
    print(response.paths[0])  # of paths [4, 41, 4]: x, y, heading, speed
