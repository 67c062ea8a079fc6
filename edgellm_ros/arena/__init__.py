# SPDX-License-Identifier: Apache-2.0
"""The demo world: solids on a floor, a robot with a camera, and spoken commands.

    scene -> renderer (camera) -> picture for the model
      |---> expert (unicycle) -> actions to learn          situation = one moment, a training sample
      '---> language, answers -> text to learn             episode   = a whole drive, to be scored

    language -> voice (speaker) -> rooms (microphone) -> sound for the model

The package depends on NumPy and OpenCV only. `voice` imports the speech synthesiser when it is used.
"""
