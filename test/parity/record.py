# SPDX-License-Identifier: Apache-2.0
"""Records what transformers and PyTorch answer in a few arena scenes.

The record is for machines that have neither.

    python test/parity/record.py            # after the checkpoint has changed

Writes test/data/arena_references.npz, which test_recorded_references.py holds the runtime against.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import cv2
import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from checkpoint_digest import checkpoint_digest  # noqa: E402
from comparison import LOGPROBS  # noqa: E402
from expert_reference import ExpertReference  # noqa: E402
from thinker_reference import ThinkerReference  # noqa: E402
from unseen_scenes import MAX_TOKENS, scenes  # noqa: E402

from edgellm_ros.kernels.random import normal_noise  # noqa: E402

CHECKPOINT = Path(os.environ.get("EDGELLM_CHECKPOINT", ROOT / "models" / "arena"))
FILE = ROOT / "test" / "data" / "arena_references.npz"
SCENES = 3
SEED = 7


def record(checkpoint: Path, count: int) -> dict[str, np.ndarray]:
    """Return arrays by name for scenes whose answer ends in a trajectory.

    The names of the arrays of scene i end in `_i`.
    """
    thinker = ThinkerReference(checkpoint)
    expert = ExpertReference.load(checkpoint / "action_expert")
    space = expert.config["action_space"]
    arrays: dict[str, np.ndarray] = {}
    prompts: list[str] = []
    for scene in scenes(10 * count, SEED):
        i = len(prompts)
        if i == count:
            break
        prompt = thinker.prompt(scene.prompt, image=scene.image, history=scene.history)
        answer = thinker.answer(prompt, MAX_TOKENS)
        if answer.token_ids[-1] != expert.config["future_start_token_id"]:
            continue
        prompts.append(scene.prompt)
        top = torch.log_softmax(answer.logits.double(), dim=-1).topk(LOGPROBS)
        noise = normal_noise(scene.noise_seed, 1, space["horizon"] * len(space["names"]))
        start = answer.cache[0][0].shape[1] + answer.delta
        shape = (space["horizon"], len(space["names"]))
        actions = expert.sample(
            torch.from_numpy(noise.reshape(shape)), expert.config["num_denoise_steps"], answer.cache, start
        )
        arrays |= {
            f"image_{i}": np.frombuffer(cv2.imencode(".png", scene.image[:, :, ::-1])[1], np.uint8),
            f"history_{i}": scene.history,
            f"noise_seed_{i}": np.array(scene.noise_seed),
            f"token_ids_{i}": np.array(answer.token_ids),
            f"top_ids_{i}": top.indices.numpy(),
            f"top_logprobs_{i}": top.values.numpy(),
            f"actions_{i}": expert.physical(actions).numpy(),
        }
    return {"checkpoint": np.array(checkpoint_digest(checkpoint)), "prompts": np.array(prompts), **arrays}


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FILE, **record(CHECKPOINT, SCENES))
    print(f"{FILE}: {FILE.stat().st_size / 1000:.0f} kB")
