# SPDX-License-Identifier: Apache-2.0
"""Plan with the running node: `action_client.py [IMAGE]`.

Without IMAGE, the plan is about the node's newest camera frame.
"""

import sys

from edgellm_ros.client import PlanClient, PlanError

try:
    with PlanClient(name="/edgellm") as client:
        with client.stream("go to the red box", images=sys.argv[1:], action_samples=4, noise_seed=1) as call:
            for progress in call:
                print(progress.new_text, end="", flush=True)
            result = call.result()
        print()
        if result.paths is not None:  # the model decided to drive
            print(result.paths[0])  # of paths [4, 41, 3]: x, y, heading

        result = client.plan("what do you see?", images=sys.argv[1:], action_samples=0, timeout_s=30.0)
        print(result.text)
except (PlanError, OSError, ValueError) as error:  # no node, no file, no image
    sys.exit(f"action_client.py: {error}")
except KeyboardInterrupt:
    sys.exit("action_client.py: interrupted")
