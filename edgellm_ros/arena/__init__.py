# SPDX-License-Identifier: Apache-2.0
"""The demo world: a floor with coloured solids, a robot with a camera, sentences, and an expert that drives.

    scene -> renderer (camera) -> picture for the model
      |---> expert (unicycle) -> actions to learn          situation = one moment of all this, to learn from
      '---> language, answers -> words to learn            episode   = a whole drive, to be judged

    language -> voice (a speaker) -> rooms (a microphone) -> sound for the model

It depends on NumPy and OpenCV only; who speaks needs the synthesiser, which is imported then.
"""
