# SPDX-License-Identifier: Apache-2.0
"""`pytest --device tensorrt-double`: TensorRT's backend on an asynchronous device.

test/doubles/tensorrt_double.py replaces TensorRT. The code of `edgellm build` builds a plan when a test
first opens a graph.
"""

from __future__ import annotations

import functools

from doubles import tensorrt_double
from doubles.deferred_device import DeferredDevice, QueuedKernels
from edgellm_ros.kernels import host, tree_host
from fixtures.built_plans import build_on_demand


@functools.cache
def open_double() -> DeferredDevice:
    """Return the device; from now on `import tensorrt` imports the double.

    That is so in this process.
    """
    tensorrt_double.install()
    host_kernels, tree_kernels = host.HostKernels, tree_host.HostTreeKernels
    host.HostKernels = lambda: QueuedKernels(host_kernels())
    tree_host.HostTreeKernels = lambda: QueuedKernels(tree_kernels())
    build_on_demand()
    return DeferredDevice("tensorrt")
