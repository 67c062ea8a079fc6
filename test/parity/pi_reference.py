# SPDX-License-Identifier: Apache-2.0
"""A program that saves what LeRobot's pi0 and pi0.5 compute.

The models are those of LeRobot 0.6.1, with random weights.

    python pi_reference.py FOLDER

For each of `pi_cases.SHAPES` it writes FOLDER/NAME with `checkpoint` as LeRobot saves it, and `expected.npz`
with physical actions of all cameras, of the last one alone, and of a chunk that continues another. A program
of its own, because the tests have LeRobot 0.4.4 in their process.

FOLDER/NAME/old has configuration, processors and inputs of LeRobot 0.4.4 for cases of that version: the
models of both are the same, but 0.4.4's need changes to transformers.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import types
from pathlib import Path

sys.path[1:1] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import lerobot_policies  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from pi_cases import DELAY, GUIDANCE, SHAPES, TASK, Observation, PiShape, write_tokenizer  # noqa: E402

LEROBOT, UNRELATED = "0.6.1", ("av", "lerobot.motors")


class Reference:
    """LeRobot's policy and processors of one shape."""

    def __init__(self, shape: PiShape, folder: Path, seed: int) -> None:
        self.shape, self.folder, self.seen = shape, folder, Observation(shape, seed)
        vocabulary = write_tokenizer(folder / "vlm")
        modeling, configuration, processors = (
            importlib.import_module(f"lerobot.policies.{shape.kind}.{name}_{shape.kind}")
            for name in ("modeling", "configuration", "processor")
        )
        from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature

        kind = "PI05" if shape.kind == "pi05" else "PI0"
        features = [
            {name: PolicyFeature(FeatureType(own), size) for name, (own, size) in each.items()}
            for each in shape.features()
        ]
        self.config = getattr(configuration, f"{kind}Config")(
            input_features=features[0],
            output_features=features[1],
            normalization_mapping={k: NormalizationMode(way) for k, way in shape.normalization.items()},
            **shape.config,
        )
        with _small(modeling, shape, vocabulary):
            self.policy = getattr(modeling, f"{kind}Policy")(self.config).eval().float()
        self._randomise(seed)
        tensors = {
            key: {name: torch.tensor(values) for name, values in each.items()}
            for key, each in self.seen.stats.items()
        }
        from lerobot.processor import tokenizer_processor
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "vlm")
        tokenizer_processor.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda name: tokenizer)
        make = getattr(processors, f"make_{shape.kind}_pre_post_processors")
        self.before, self.after = make(self.config, tensors)

    def _randomise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.policy.named_parameters():
                values = torch.randn(parameter.shape, generator=generator)
                if parameter.ndim > 1:
                    strong = "projector" in name or "v_proj" in name  # so that images matter
                    parameter.copy_(values * parameter[0].numel() ** -0.5 * (4 if strong else 1))
                else:  # LayerNorms of the tower have a scale of 1, Gemma's of 1 + weight
                    tower = "vision_tower" in name and "norm" in name and name.endswith("weight")
                    parameter.copy_(values * 0.1 + float(tower))

    def save(self) -> None:
        """Save policy and processors as LeRobot, and PEFT, do."""
        checkpoint, old = self.folder / "checkpoint", self.folder / "old"
        self.policy.save_pretrained(checkpoint)
        parts = [self.before, self.after]
        if old.is_dir():
            shutil.copytree(old, checkpoint, dirs_exist_ok=True)
            parts = []
        if self.shape.adapter:
            import peft

            base = checkpoint.rename(self.folder / "base")
            self.policy.name_or_path = str(base)  # as LeRobot's wrap_with_peft
            modules = r".*\.gemma_expert\..*\.self_attn\.(q|v)_proj|model\.(action_in_proj|action_out_proj)"
            config = peft.LoraConfig(r=3, lora_alpha=12, target_modules=modules, init_lora_weights=False)
            torch.manual_seed(0)
            peft.get_peft_model(self.policy, config).save_pretrained(checkpoint)
            self.config.use_peft = True
            self.config.save_pretrained(checkpoint)
        for part in parts:
            part.save_pretrained(checkpoint)

    def batch(self, cameras: list[str]) -> dict:
        """Make the policy's inputs of the frames of some cameras."""
        images = {
            f"observation.images.{name}": torch.tensor(self.seen.frames[name]).permute(2, 0, 1).float() / 255
            for name in cameras
        }
        batch = self.before({"observation.state": torch.tensor(self.seen.state), "task": TASK, **images})
        inputs = self.folder / "old.npz"
        if inputs.is_file():  # as LeRobot 0.4.4 prepares them
            old = np.load(inputs)
            for name in ("tokens", "attention_mask"):
                batch[f"observation.language.{name}"] = torch.tensor(old[name])
            for name in cameras:
                batch[f"observation.images.{name}"] = (torch.tensor(old[f"image_{name}"]) + 1) / 2
        return batch

    def actions(self, cameras: list[str], **options) -> np.ndarray:
        """Compute physical actions [n,T,A]."""
        noise = torch.tensor(self.seen.noise)
        batch = {
            name: value.expand(len(noise), *value.shape[1:]) if isinstance(value, torch.Tensor) else value
            for name, value in self.batch(cameras).items()
        }
        return self.after(self.policy.predict_action_chunk(batch, noise=noise, **options)).numpy()

    def guided(self, cameras: list[str]) -> np.ndarray:
        """Compute a chunk that continues another, whose first action has been executed."""
        from lerobot.configs import RTCAttentionSchedule
        from lerobot.policies.rtc.configuration_rtc import RTCConfig

        end = self.config.chunk_size - 2
        self.policy.config.rtc_config = RTCConfig(
            enabled=True,
            prefix_attention_schedule=RTCAttentionSchedule.LINEAR,
            max_guidance_weight=GUIDANCE,
            execution_horizon=end,
        )
        self.policy.init_rtc_processor()
        left = torch.tensor(self.seen.previous[1:]).expand(len(self.seen.noise), -1, -1)
        return self.actions(cameras, inference_delay=DELAY, prev_chunk_left_over=left, execution_horizon=end)


class _small:
    """Makes models of a shape's sizes in place of Gemma's and SigLIP's."""

    def __init__(self, modeling: types.ModuleType, shape: PiShape, vocabulary: int) -> None:
        from lerobot.policies import pi_gemma

        self._modeling, real = modeling, dict(vars(modeling))
        sizes = {
            "gemma_2b": (shape.hidden, shape.layers, shape.inner, 8, 1, shape.head_dim),
            "gemma_300m": (shape.expert_hidden, shape.layers, shape.expert_inner, 8, 1, shape.head_dim),
        }

        def paligemma(config):
            vision = config.vision_config
            vision.hidden_size, vision.num_hidden_layers = shape.vision_hidden, shape.vision_depth
            vision.intermediate_size, vision.patch_size, vision.num_attention_heads = 40, shape.patch, 16
            vision.projection_dim = config.projection_dim = shape.hidden
            config.text_config.vocab_size = vocabulary
            return real["PaliGemmaForConditionalGenerationWithPiGemma"](config)

        def expert(config):
            config.vocab_size = vocabulary
            return real["PiGemmaForCausalLM"](config)

        own = {
            "get_gemma_config": lambda variant: modeling.GemmaConfig(*sizes[variant]),
            "PaliGemmaForConditionalGenerationWithPiGemma": paligemma,
            "PiGemmaForCausalLM": expert,
        }
        self._own, self._real = own, {name: real[name] for name in own}
        # transformers 5.4 has an argument more, which is not used for a mask of four axes
        mask = getattr(pi_gemma.create_causal_mask, "original", pi_gemma.create_causal_mask)
        pi_gemma.create_causal_mask = lambda cache_position=None, **others: mask(**others)
        pi_gemma.create_causal_mask.original = mask

    def __enter__(self) -> None:
        vars(self._modeling).update(self._own)

    def __exit__(self, *error: object) -> None:
        vars(self._modeling).update(self._real)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    lerobot_policies.use(LEROBOT)
    with lerobot_policies.importable(UNRELATED):
        write(folder)


def write(folder: Path) -> None:
    for seed, (name, shape) in enumerate(SHAPES.items()):
        reference = Reference(shape, folder / name, seed)
        reference.save()
        cameras = list(shape.cameras)
        expected = {"all": reference.actions(cameras), "last": reference.actions(cameras[-1:])}
        expected["guided"] = reference.guided(cameras)
        np.savez(folder / name / "expected.npz", **expected)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
