# SPDX-License-Identifier: Apache-2.0
"""edgellm_ros: see, hear, answer and act with one model on one edge computer."""

from pkgutil import extend_path

# Where this runs from a clone, the generated modules edgellm_ros.msg, .srv and .action lie in a folder of
# the same name in the virtual environment: look for submodules there as well.
__path__ = extend_path(__path__, __name__)
