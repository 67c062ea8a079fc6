# SPDX-License-Identifier: Apache-2.0
"""The demo world: solids on a floor, a robot with a camera, and spoken commands.

    world:    scene, unicycle (the robot's motion) -> renderer (camera) -> picture for the model
      |
      |-> driving:  expert, search -> actions to learn
      |-> words:    language, answers -> text to learn
      |     '-> speech:   voice (speaker) -> rooms (microphone) -> sound for the model
      |
    episodes: situation = one moment, a training sample; episode = a whole drive, to be scored
      |
      |-> evaluation: episodes in process, as items of `edgellm evaluate arena`
      '-> ros:        the arena as a ROS node, and `edgellm demo`

The rooms above `evaluation` depend on NumPy and OpenCV only. `voice` imports the speech synthesiser when it
is used. The package imports `edgellm_ros`, whose commands import this package when they run.
"""
