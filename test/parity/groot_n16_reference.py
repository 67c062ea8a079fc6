# SPDX-License-Identifier: Apache-2.0
"""A program that saves what a GR00T N1.6 computes in PyTorch.

    python groot_n16_reference.py FOLDER

Weights are random. Tower and language model are transformers' SigLIP 2 and Qwen3. The action head and the
processors of state, actions and images are those of LeRobot 0.6.1 for N1.7, whose arithmetic is the same. No
package has what joins them, which `Eagle` writes in PyTorch, and sines and cosines of a state.

For each of `groot_n16_cases.CASES` it writes FOLDER/NAME with `checkpoint` in NVIDIA's layout, and
`expected.npz` with physical actions and the tokens of the prompt, those of images left out. A program of its
own, because the tests have LeRobot 0.4.4 in their process.
"""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path

sys.path[1:1] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import lerobot_policies  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from groot_cases import GrootCase  # noqa: E402
from groot_n16_cases import CASES  # noqa: E402
from groot_reference import groot_config, import_groot  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from fixtures.groot_n16_checkpoint import write_groot_n16  # noqa: E402

FACTOR, PATCH = 28, 14  # pixels of a token's side, and of a patch's


class Eagle(torch.nn.Module):
    """Tower, connector and language model of an Eagle."""

    def __init__(self, folder: Path, layers: int) -> None:
        from transformers import Qwen3Config, Qwen3Model, Siglip2VisionConfig, Siglip2VisionModel

        super().__init__()
        config = json.loads((folder / "config.json").read_text())
        text, vision = config["text_config"], config["vision_config"]
        vision = Siglip2VisionConfig(**vision, vision_use_head=False)
        self.vision_model = Siglip2VisionModel(vision)
        self.language_model = Qwen3Model(Qwen3Config(**text | {"num_hidden_layers": layers}))
        merged, hidden = 4 * vision.hidden_size, text["hidden_size"]
        self.mlp1 = torch.nn.Sequential(
            torch.nn.LayerNorm(merged),
            torch.nn.Linear(merged, hidden),
            torch.nn.GELU(),
            torch.nn.Linear(hidden, hidden),
        )
        self.image_token = config["image_token_index"]

    def rows(self, image: np.ndarray) -> torch.Tensor:
        """Compute the rows [R,H] of an image [h,w,3] uint8."""
        height, width = (side // PATCH for side in image.shape[:2])
        pixels = (torch.tensor(image).float() / 255 - 0.5) / 0.5
        patches = (
            pixels.reshape(height, PATCH, width, PATCH, 3).transpose(1, 2).reshape(1, height * width, -1)
        )
        tower = self.vision_model(
            pixel_values=patches,
            pixel_attention_mask=torch.ones(patches.shape[:2], dtype=torch.int64),
            spatial_shapes=torch.tensor([[height, width]]),
        )
        grid = tower.last_hidden_state.reshape(1, height, width, -1).permute(0, 3, 1, 2)
        merged = torch.nn.functional.pixel_unshuffle(grid, 2)
        return self.mlp1(merged.flatten(2).transpose(1, 2))[0]

    def forward(self, tokens: torch.Tensor, images: list[np.ndarray]) -> torch.Tensor:
        """Compute the rows of a prompt [1,S,H] after the last norm."""
        embeds = self.language_model.embed_tokens(tokens).clone()
        embeds[tokens == self.image_token] = torch.cat([self.rows(image) for image in images])
        return self.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state


class Reference:
    """Model and processors of one case."""

    def __init__(self, modules: list[types.ModuleType], case: GrootCase, folder: Path) -> None:
        groot, configuration, self.processors, _ = modules
        self.case, self.folder = case, folder / "checkpoint"
        write_groot_n16(self.folder, seed=len(case.task), shape=case.shape)
        config = json.loads((self.folder / "config.json").read_text())
        options = {**config, "vl_self_attention_cfg": None, "state_history_length": 1}
        self.head = groot.GR00TN17ActionHead(groot.GR00TN17Config(**options)).eval()
        self.eagle = Eagle(self.folder / "vlm", config["select_layer"]).eval()
        self._load()
        self._make_processors(configuration, config)

    def _load(self) -> None:
        """Load the weights, all of which must have a place."""
        tensors = load_file(self.folder / "model.safetensors")
        names = {
            "action_head.": (self.head, ""),
            "backbone.model.vision_model.vision_model.": (self.eagle, "vision_model."),
            "backbone.model.language_model.model.": (self.eagle, "language_model."),
            "backbone.model.mlp1.": (self.eagle, "mlp1."),
        }
        for module in (self.head, self.eagle):
            given = {
                own + name.removeprefix(prefix): tensor.float()
                for prefix, (owner, own) in names.items()
                for name, tensor in tensors.items()
                if owner is module and name.startswith(prefix)
            }
            unused = {"position_embedding.weight", "vlln.weight", "vlln.bias"}  # by the options of a case
            missing, unexpected = module.load_state_dict(given, strict=False)
            assert not missing, missing
            assert unused.issuperset(unexpected), unexpected

    def _make_processors(self, configuration: types.ModuleType, config: dict) -> None:
        """Make LeRobot's processors from the folder, as that of an N1.7."""
        path = self.folder / "config.json"
        settings = groot_config(configuration, self.case.shape, self.folder)
        path.write_text(json.dumps({**config, "model_type": "Gr00tN1d7"}))
        try:
            before, self.after = self.processors.make_groot_pre_post_processors(settings, None)
        finally:
            path.write_text(json.dumps(config))
        before.steps = [
            step for step in before.steps if not isinstance(step, self.processors.GrootN17VLMEncodeStep)
        ]
        self.before = before

    def _images(self) -> list[np.ndarray]:
        """Crop the images of all times and cameras, and resize them to whole tokens."""
        settings = json.loads((self.folder / "processor_config.json").read_text())["processor_kwargs"]
        names = "image_crop_size", "image_target_size", "shortest_image_edge", "crop_fraction"
        options, functional = {name: settings[name] for name in names}, self.processors.tv_functional
        target = options["image_target_size"]
        if options["shortest_image_edge"] is None:
            options["shortest_image_edge"] = target[0]
        cropped = []
        for frame in self.case.frames.values():
            if settings["use_albumentations"]:
                box = settings.get("letter_box_transform", False)
                crop = self.processors._transform_n1_7_image_for_vlm_albumentations
                image = crop(frame, letter_box_transform=box, **options)
            else:
                edge, (height, width) = max(frame.shape), frame.shape[:2]
                left, top = (edge - width) // 2, (edge - height) // 2
                sides = [left, top, edge - width - left, edge - height - top]
                pixels = functional.pad(torch.tensor(frame).permute(2, 0, 1), sides, fill=0)
                kept = functional.center_crop(functional.resize(pixels, target), options["image_crop_size"])
                image = functional.resize(kept, target).permute(1, 2, 0).numpy()
            size = [round(side / FACTOR) * FACTOR for side in image.shape[:2]]
            cropped.append(np.array(Image.fromarray(np.ascontiguousarray(image)).resize(size[::-1])))
        return cropped * len(self.case.shape.frames)

    def _tokens(self, images: list[np.ndarray]) -> torch.Tensor:
        """Make the tokens of the prompt [1,S]."""
        from transformers import AutoTokenizer

        folder = self.folder / "vlm"
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = self.case.task
        if self.case.shape.settings.get("formalize_language", True):
            text = re.sub(r"[^\w\s]", "", text.lower())
        content = [{"type": "text", "text": text}, *[{"type": "image"}] * len(images)]
        template = json.loads((folder / "chat_template.json").read_text())["chat_template"]
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], chat_template=template, tokenize=False
        )
        for number, image in enumerate(images, 1):
            rows = image.shape[0] * image.shape[1] // FACTOR**2
            expanded = f"<image {number}><img>{'<IMG_CONTEXT>' * rows}</img>"
            rendered = rendered.replace(f"<image-{number}>", expanded)
        return tokenizer([rendered], return_tensors="pt").input_ids

    def _with_angles(self, state: torch.Tensor) -> torch.Tensor:
        """Put sines and cosines for keys that are angles; LeRobot's code does not."""
        shape, values, first = self.case.shape, [], 0
        for key, size in shape.state.items():
            angles = torch.tensor(self.case.state[None, None, first : first + size])
            plain = [state[..., first : first + size]]
            values += [angles.sin(), angles.cos()] if key in shape.angles else plain
            first += size
        joined = torch.cat(values, dim=-1)
        return torch.nn.functional.pad(joined, (0, shape.model_dim - joined.shape[-1]))

    def expected(self) -> dict[str, np.ndarray]:
        """Compute tokens without those of images, and physical actions [n,T,A]."""
        from transformers.feature_extraction_utils import BatchFeature

        images = self._images()
        tokens = self._tokens(images)
        frames = {
            f"observation.images.{name}": torch.tensor(frame).permute(2, 0, 1).float() / 255
            for name, frame in self.case.frames.items()
        }
        observation = {"observation.state": torch.tensor(self.case.state), "task": self.case.task, **frames}
        batch = self.before(observation)
        inputs = BatchFeature(
            {"state": self._with_angles(batch["state"]), "embodiment_id": batch["embodiment_id"]}
        )
        results = []
        for noise in self.case.noise:
            start = torch.tensor(noise)[None]
            normal, torch.randn = torch.randn, lambda *args, start=start, **kwargs: start.clone()
            try:
                with torch.no_grad():
                    context = BatchFeature(
                        {
                            "backbone_features": self.eagle(tokens, images),
                            "backbone_attention_mask": torch.ones_like(tokens) == 1,
                            "image_mask": tokens == self.eagle.image_token,
                        }
                    )
                    results.append(self.head.get_action(context, inputs)["action_pred"])
            finally:
                torch.randn = normal
        kept = tokens[tokens != self.eagle.image_token].numpy()
        return {"actions": np.concatenate([self.after(each).numpy() for each in results]), "tokens": kept}


def write(folder: Path) -> None:
    modules = import_groot()
    for name, case in CASES.items():
        np.savez(folder / name / "expected.npz", **Reference(modules, case, folder / name).expected())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    lerobot_policies.use("0.6.1")
    with lerobot_policies.importable():
        write(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
