# SPDX-License-Identifier: Apache-2.0
"""Runs the graph of a draft head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from engine_graphs import Graph

from edgellm_ros.engine_directory.config import EngineConfig


class Draft:
    """`draft/model.onnx` with its cache, for one sequence."""

    def __init__(self, engine: Path, config: EngineConfig) -> None:
        self.graph = Graph(engine / "draft" / "model.onnx")
        self.frequencies = np.array(config.draft.rope.frequencies)
        caches = [name for name in self.graph.inputs if "_cache_" in name]
        self.capacity = self.graph.inputs["attention_mask"].shape[3]
        shape = [1, *self.graph.inputs["key_cache_0"].shape[1:]]
        # Rows that no run has written may hold anything finite.
        self.cache = {name: np.full(shape, 7.0, np.float32) for name in caches}

    def run(self, e, g, positions, seen, first: int, wanted) -> tuple[np.ndarray, np.ndarray]:
        angles = np.asarray(positions)[:, None] * self.frequencies
        mask = np.zeros((1, 1, len(e), self.capacity), bool)
        mask[0, 0, :, : seen.shape[1]] = seen
        out = self.graph(
            inputs_embeds=e[None],
            hidden_states=g[None],
            rope_cos=np.cos(angles)[None],
            rope_sin=np.sin(angles)[None],
            kv_write_index=np.array([first]),
            attention_mask=mask,
            last_token_ids=np.array([wanted]),
            **self.cache,
        )
        self.cache = {name: out["present_" + name.replace("_cache_", "_")] for name in self.cache}
        return out["logits"][0], out["next_hidden_states"][0]
