# SPDX-License-Identifier: Apache-2.0
"""Makes the keystore of a policy with sros2.

The keystore has keys, certificates and signed permissions of each enclave.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path


def has_sros2() -> bool:
    """Whether sros2 is installed; it is a part of ROS, and not on PyPI."""
    return importlib.util.find_spec("sros2") is not None


def make_keystore(keystore: Path, policy: Path, enclaves: Sequence[str]) -> None:
    """Make the keystore, or add to it, and sign the permissions of the enclaves.

    Only the user of this process may read its files. ImportError without sros2, ValueError if sros2 refuses.
    """
    from sros2 import errors
    from sros2 import keystore as sros2

    umask = os.umask(0o077)  # sros2 would let everyone read private keys
    try:
        if not sros2.is_valid_keystore(keystore):
            sros2.create_keystore(keystore)
        for enclave in enclaves:
            _make_enclave(keystore, policy, enclave, sros2)
    except errors.SROS2Error as error:
        raise ValueError(f"sros2: {error}") from None
    finally:
        os.umask(umask)


def _make_enclave(keystore: Path, policy: Path, enclave: str, sros2) -> None:
    """Make an enclave with the permissions of the policy.

    An enclave that sros2 has just made may do everything: without the policy's permissions it gets none.
    """
    sros2.create_enclave(keystore, enclave)
    try:
        sros2.create_permission(keystore, enclave, policy)
    except BaseException:
        for name in ("permissions.xml", "permissions.p7s"):
            (keystore / "enclaves" / enclave.strip("/") / name).unlink(missing_ok=True)
        raise
