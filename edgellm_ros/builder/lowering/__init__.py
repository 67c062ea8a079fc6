# SPDX-License-Identifier: Apache-2.0
"""From the description of a decoder (`builder/model/`) to what a backend runs.

    standard     ONNX's operators, which every backend takes
    onnxruntime  ONNX Runtime's own operators: for its CUDA provider, and for a CPU with quantised weights
    fused.py     the description of weights that the fused kernels read

A block is written once in each. A new kind of block needs a case in `blocks.py` of the first two.
"""
