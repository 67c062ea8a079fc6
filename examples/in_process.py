# SPDX-License-Identifier: Apache-2.0
"""Plan in this process, without ROS: `in_process.py ENGINE_DIR IMAGE`."""

import sys

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.io.image_file import read_image
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest

if len(sys.argv) != 3:
    sys.exit(__doc__)
engine_dir, image = sys.argv[1:]
try:
    frame = read_image(image)  # RGB uint8 [H, W, 3]
    with LLMInferenceRuntime(engine_dir) as runtime:
        response = runtime.handle_request(
            LLMGenerationRequest("go to the red box", images=(frame,), action_samples=4, noise_seed=1)
        )
except (EngineError, OSError, ValueError) as error:  # no such file, or a damaged one
    sys.exit(f"in_process.py: {error}")
except KeyboardInterrupt:
    sys.exit("in_process.py: interrupted")
print(response.text)
if response.paths is not None:  # the model decided to drive
    print(response.paths[0])  # of paths [4, 41, 4]: x, y, heading, speed
