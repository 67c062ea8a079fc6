# SPDX-License-Identifier: Apache-2.0
"""A program that saves what LeRobot's GR00T N1.7 computes.

The model is that of LeRobot 0.6.1, with random weights.

    python groot_reference.py FOLDER

For each of `groot_cases.CASES` it writes FOLDER/NAME with `checkpoint` in NVIDIA's layout, `lerobot` as
LeRobot saves it if the case says so, and `expected.npz` with physical actions, also of a chunk that continues
another unless actions are relative. FOLDER/images.npz has images as the processors of LeRobot and NVIDIA
resize them. A program of its own, because the tests have LeRobot 0.4.4 in their process.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import lerobot_policies  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from groot_cases import (  # noqa: E402
    CASES,
    CROP_SETTINGS,
    CROPS,
    DELAY,
    END,
    EXECUTED,
    SQUARE_SETTINGS,
    SQUARED,
    GrootCase,
    image_key,
    picture,
)

from fixtures.groot_checkpoint import ROBOT, GrootShape, write_groot  # noqa: E402

LEROBOT, IMAGE = "0.6.1", "<|image_pad|>"
FOLDER = "lerobot.policies.groot"
MODULES = "groot_n1_7", "configuration_groot", "processor_groot", "modeling_groot"


def import_groot() -> list[types.ModuleType]:
    """Import the modules of LeRobot's GR00T, in the order of MODULES."""
    package = types.ModuleType(FOLDER)  # whose __init__ is not needed
    package.__path__ = [str(lerobot_policies.installed(LEROBOT) / FOLDER.replace(".", "/"))]
    sys.modules[FOLDER] = package
    modules = [importlib.import_module(f"{FOLDER}.{name}") for name in MODULES]
    layers = importlib.import_module(f"{FOLDER}.action_head.cross_attention_dit")
    for module in (*modules, layers):  # which ask for packages that are not installed as such
        module.require_package = lambda *args, **kwargs: None
    modules[0].tree = types.SimpleNamespace(map_structure=_changed)  # in place of dm-tree: batches are flat
    return modules


def _changed(change: Callable[[Any], Any], batch: Any) -> Any:
    """Change the values of a transformers' BatchFeature."""
    return type(batch)({name: change(value) for name, value in batch.items()})


class _Processor:
    """Qwen3VLProcessor of transformers without videos.

    The processor of videos needs torchvision.
    """

    def __init__(self, vlm: Path) -> None:
        from transformers import AutoTokenizer
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.tokenizer = AutoTokenizer.from_pretrained(vlm)
        self.images = Qwen2VLImageProcessorPil.from_pretrained(vlm)

    def apply_chat_template(self, conversation, **options) -> str:
        return self.tokenizer.apply_chat_template(conversation, **options)

    def __call__(self, text: list[str], images: list, **options) -> dict:
        encoded = self.images(images=images, return_tensors="pt")
        rows = encoded["image_grid_thw"].prod(-1) // self.images.merge_size**2
        parts = text[0].split(IMAGE)
        counts = [IMAGE * int(count) for count in rows] + [""]
        joined = "".join(part + count for part, count in zip(parts, counts, strict=True))
        return {**encoded, **self.tokenizer([joined], return_tensors="pt")}


def groot_config(configuration: types.ModuleType, shape: GrootShape, folder: Path) -> Any:
    """Return LeRobot's configuration of the checkpoint in a folder."""
    kinds, feature = configuration.FeatureType, configuration.PolicyFeature
    state, actions = sum(shape.state.values()), sum(shape.actions.values())
    images = {f"observation.images.{name}": feature(kinds.VISUAL, (3, 48, 64)) for name in shape.cameras}
    return configuration.GrootConfig(
        input_features={**images, "observation.state": feature(kinds.STATE, (state,))},
        output_features={"action": feature(kinds.ACTION, (actions,))},
        base_model_path=str(folder),
        embodiment_tag=ROBOT,
        max_state_dim=shape.model_dim,
        max_action_dim=shape.model_dim,
        chunk_size=shape.steps,
        n_action_steps=shape.steps,
        device="cpu",
    )


class Reference:
    """LeRobot's model and processors of one case."""

    def __init__(self, modules: list[types.ModuleType], case: GrootCase, folder: Path) -> None:
        _, configuration, processors, modeling = modules
        self.case, shape, checkpoint = case, case.shape, folder / "checkpoint"
        own = {"model_name": str(checkpoint / "vlm"), "dtype": "float32"}
        write_groot(checkpoint, seed=len(case.task), shape=shape, **own)
        config = groot_config(configuration, shape, checkpoint)
        self.policy = modeling.GrootPolicy(config).eval().float()
        stats = {
            key: {name: torch.tensor(values) for name, values in each.items()}
            for key, each in case.stats.items()
        }
        self.before, self.after = processors.make_groot_pre_post_processors(config, stats or None)
        if case.saved:
            for part in (self.policy, self.before, self.after):
                part.save_pretrained(folder / "lerobot")
        for step in self.before.steps:
            if isinstance(step, processors.GrootN17VLMEncodeStep):
                step._proc = _Processor(checkpoint / "vlm")

    def _batch(self) -> dict:
        """Make the model's inputs."""
        images = {
            f"observation.images.{name}": torch.tensor(frame).permute(2, 0, 1).float() / 255
            for name, frame in self.case.frames.items()
        }
        batch = self.before(
            {"observation.state": torch.tensor(self.case.state), "task": self.case.task, **images}
        )
        return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}

    def actions(self, options: dict | None = None, **more: torch.Tensor) -> np.ndarray:
        """Compute physical actions [n,T,A]."""
        model, results = self.policy._groot_model, []
        for each in self.case.noise:
            start = torch.tensor(each)[None]
            normal, torch.randn = torch.randn, lambda *args, start=start, **kwargs: start.clone()
            try:
                with torch.no_grad():
                    results.append(model.get_action(self._batch() | more, options)["action_pred"])
            finally:
                torch.randn = normal
        return np.concatenate([self.after(result).numpy() for result in results])

    def frozen(self) -> np.ndarray:
        """Compute a chunk that continues another, whose first action has been executed."""
        previous = self.case.previous
        left = torch.zeros(1, END, self.case.shape.model_dim)
        left[0, :, : previous.shape[1]] = torch.tensor(previous[EXECUTED : EXECUTED + END])
        options = {
            "action_horizon": END,
            "rtc_overlap_steps": END,
            "rtc_frozen_steps": DELAY,
            "rtc_ramp_rate": 6.0,
        }
        return self.actions(options, action=left)


def resized_images(processors: types.ModuleType) -> Mapping[str, np.ndarray]:
    """Resize images by LeRobot's code, and squares also as NVIDIA's calls torchvision."""
    found = {}
    for size, box in CROPS:
        crop = processors._transform_n1_7_image_for_vlm_albumentations
        image = crop(picture(size), letter_box_transform=box, **CROP_SETTINGS)
        found[image_key("crop", size, box)] = image
    functional, own = processors.tv_functional, {"shortest_image_edge": None, "crop_fraction": None}
    target, kept = SQUARE_SETTINGS["image_target_size"], SQUARE_SETTINGS["image_crop_size"]
    for size, lerobot in SQUARED:
        pixels = torch.tensor(picture(size, 64, 192)).permute(2, 0, 1)
        if lerobot:
            image = processors._transform_n1_7_image_for_vlm_torch(pixels, **SQUARE_SETTINGS, **own)
        else:
            image = functional.resize(functional.center_crop(functional.resize(pixels, target), kept), target)
        found[image_key("square", size, lerobot)] = image.permute(1, 2, 0).numpy()
    return found


def write(folder: Path) -> None:
    modules = import_groot()
    for name, case in CASES.items():
        reference = Reference(modules, case, folder / name)
        expected = {"actions": reference.actions()}
        if not case.saved and not case.shape.representations:  # LeRobot continues no relative actions
            expected["frozen"] = reference.frozen()
        np.savez(folder / name / "expected.npz", **expected)
    np.savez(folder / "images.npz", **resized_images(modules[2]))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    lerobot_policies.use(LEROBOT)
    with lerobot_policies.importable():
        write(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
