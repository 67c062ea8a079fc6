# SPDX-License-Identifier: Apache-2.0
"""The checkpoint run by transformers, with an adapter that PEFT has put into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peft import PeftModel
from thinker_reference import ThinkerReference


@contextmanager
def taken_for_dense(model) -> Iterator[None]:
    """Give the model a type that PEFT does not take for a mixture of experts.

    PEFT 0.21 takes the thinker's model type for one, and would look for feed-forward layers of other names.
    """
    model.config.model_type = "dense"
    try:
        yield
    finally:
        del model.config.model_type


class PeftReference(ThinkerReference):
    """A checkpoint with a PEFT adapter in fp32 on the CPU."""

    def __init__(self, checkpoint: Path, adapter: Path) -> None:
        super().__init__(checkpoint)
        with taken_for_dense(self.model):
            PeftModel.from_pretrained(self.model, adapter)  # changes the layers of self.model
