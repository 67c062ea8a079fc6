# SPDX-License-Identifier: Apache-2.0
"""Runs the graphs of an engine directory in ONNX Runtime alone.

Nothing of the package's own runtime is in between.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from edgellm_ros.engine.onnxruntime.session import open_session

TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}


class Graph:
    """One `model.onnx`. Inputs may be NumPy arrays or torch tensors of any float type."""

    def __init__(self, path: Path) -> None:
        self.session = open_session(path, threads=1)  # more would get in the way of PyTorch's
        self.inputs = {node.name: node for node in self.session.get_inputs()}
        self.outputs = [node.name for node in self.session.get_outputs()]

    def __call__(self, **inputs) -> dict[str, np.ndarray]:
        feeds = {}
        for name, value in inputs.items():
            feeds[name] = np.ascontiguousarray(np.asarray(value).astype(TYPES[self.inputs[name].type]))
        return dict(zip(self.outputs, self.session.run(None, feeds), strict=True))


class Encoders:
    """The encoder graphs, and what they put in the places of a prompt's placeholders."""

    def __init__(self, engine: Path) -> None:
        self.graphs = {
            part: Graph(engine / part / "model.onnx")
            for part in ("visual", "audio")
            if (engine / part / "model.onnx").is_file()
        }

    def vision(self, thinker, prompt) -> list[np.ndarray]:
        """Image rows, then the deepstack rows of each level, [R, H] each."""
        inputs = thinker.vision_inputs(prompt)
        vision = thinker.model.config.vision_config
        frames = prompt.pixel_values.unflatten(1, (vision.in_channels, vision.temporal_patch_size, -1))
        return list(self.graphs["visual"](pixel_values=frames[:, :, 0].flatten(1), **inputs).values())

    def audio(self, thinker, prompt) -> np.ndarray:
        """Rows of all sounds, [A, H]."""
        return self.graphs["audio"](**thinker.audio_inputs(prompt))["audio_embeds"]

    def embed(self, thinker, prompt, embedding: np.ndarray) -> tuple[np.ndarray, list[np.ndarray] | None]:
        """Return the embeddings of a prompt [S, H], and those of each deepstack level.

        Embeddings of levels are None without an image.
        """
        ids = prompt.input_ids[0].numpy()
        embeds, deepstack = embedding[ids], None
        if prompt.pixel_values is not None:
            places = ids == thinker.model.config.image_token_id
            embeds[places], *levels = self.vision(thinker, prompt)
            deepstack = [np.zeros_like(embeds) for _ in levels]
            for target, rows in zip(deepstack, levels, strict=True):
                target[places] = rows
        if prompt.input_features is not None:
            embeds[ids == thinker.model.config.audio_token_id] = self.audio(thinker, prompt)
        return embeds, deepstack


class LanguageModel:
    """The LLM graph with its cache, for one sequence at a time.

    adapter: what to bind to the adapter inputs, name -> array; None = the base model, rank 0.
    open_graph: makes the graph from its path; None = ONNX Runtime.
    """

    def __init__(self, engine: Path, adapter: dict[str, np.ndarray] | None = None, open_graph=None) -> None:
        self.graph = (open_graph or Graph)(engine / "llm" / "model.onnx")
        self.embedding = load_file(engine / "embedding.safetensors")["embedding"]
        self.cache_names = [name for name in self.graph.inputs if "_cache_" in name]
        self.adapter = adapter or {
            name: np.zeros([size if isinstance(size, int) else 0 for size in node.shape])
            for name, node in self.graph.inputs.items()
            if ".lora_" in name
        }
        self.deepstack_names = [name for name in self.graph.inputs if name.startswith("deepstack_")]
        self.capacity = self.graph.inputs["attention_mask"].shape[3]
        self.reset()

    def reset(self) -> None:
        self.length = 0
        shape = [1, *self.graph.inputs["key_cache_0"].shape[1:]]
        self.cache = {name: np.zeros(shape, np.float32) for name in self.cache_names}
        self.state = {
            name: np.zeros([1, *self.graph.inputs[name].shape[1:]], np.float32)
            for name in self.graph.inputs
            if name.startswith(("conv_state_", "recurrent_state_"))
        }

    def step(self, embeds, rope_cos=None, rope_sin=None, deepstack=None, wanted=None) -> np.ndarray:
        """Run new tokens; return the logits [N, V] of the wanted tokens.

        embeds: [S, H]. rope_cos, rope_sin: rows [1, S, D/2]. deepstack: [S, H] each. wanted: None = the last
        token.
        """
        count = len(embeds)
        rows = np.arange(self.capacity)[None] <= (self.length + np.arange(count))[:, None]
        levels = deepstack or [np.zeros_like(embeds)] * len(self.deepstack_names)
        rope = {} if rope_cos is None else {"rope_cos": rope_cos, "rope_sin": rope_sin}
        valid = {"valid_tokens": np.array([count])} if self.state else {}
        out = self.graph(
            inputs_embeds=np.asarray(embeds)[None],
            **rope,
            **valid,
            **self.state,
            kv_write_index=np.array([self.length]),
            attention_mask=rows[None, None],
            last_token_ids=np.array([[count - 1] if wanted is None else wanted]),
            **{
                name: np.asarray(level)[None]
                for name, level in zip(self.deepstack_names, levels, strict=True)
            },
            **self.cache,
            **self.adapter,
        )
        self.length += count
        self.cache = {name: out["present_" + name.replace("_cache_", "_")] for name in self.cache_names}
        self.state = {name: out[f"present_{name}"] for name in self.state}
        return out["logits"][0]

    def prefill(self, thinker, encoders: Encoders, prompt, wanted=None) -> np.ndarray:
        """Run a prompt from an empty cache; return the logits [N, V] of the wanted tokens.

        wanted: None = the last token.
        """
        self.reset()
        embeds, deepstack = encoders.embed(thinker, prompt, self.embedding)
        positions, _ = thinker.positions(prompt)
        return self.step(embeds, *thinker.rope_rows(positions), deepstack, wanted)

    def kv(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Filled rows of one layer's keys and values, [Hkv, length, D]."""
        return tuple(self.cache[f"{kind}_cache_{layer}"][0, :, : self.length] for kind in ("key", "value"))
