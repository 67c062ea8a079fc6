# SPDX-License-Identifier: Apache-2.0
"""Scales of `edgellm export --calibrate` against AWQ's search, in PyTorch on transformers' model."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.builder.calibration import find_scales, plan_calibration  # noqa: E402
from edgellm_ros.builder.export_plan import ExportOptions  # noqa: E402
from edgellm_ros.cli.calibration import layer_inputs  # noqa: E402
from edgellm_ros.cli.token_runs import TokenRun, text_inputs  # noqa: E402
from fixtures.outlier_checkpoint import write_outlier_checkpoint  # noqa: E402

GROUP, TOP = 32, {"int4": 7, "int8": 127}


def awq_scales(layers: list[torch.nn.Linear], x: torch.Tensor, top: int) -> tuple[float, torch.Tensor]:
    """The search of llm-awq's `auto_scale_block`, with symmetric groups; x [T,K]."""

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        blocks = weight.reshape(-1, GROUP)
        steps = blocks.abs().amax(1, keepdim=True).clamp(min=1e-5) / top
        return (torch.clamp(torch.round(blocks / steps), -top - 1, top) * steps).reshape(weight.shape)

    magnitudes, best = x.abs().mean(0), (float("inf"), 0.0, x)
    for step in range(20):
        scales = magnitudes.pow(step / 20).clamp(min=1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        loss = sum(
            ((x @ layer.weight.T - (x / scales) @ rounded(layer.weight * scales).T) ** 2).sum().item()
            for layer in layers
        )
        best = min(best, (loss, step / 20, scales), key=lambda found: found[0])
    return best[1], best[2]


@pytest.mark.parametrize("kind", TOP)
@torch.no_grad()
def test_scales_are_those_of_awqs_search(tmp_path, kind):
    checkpoint = write_outlier_checkpoint(tmp_path / "checkpoint", num_key_value_heads=4)
    options = ExportOptions(quantize=kind, group_size=GROUP, max_lora_rank=0)
    plan = plan_calibration(checkpoint, options)
    export(checkpoint, tmp_path / "engine", **plan.arguments)
    ids = np.random.default_rng(0).integers(0, 200, (8, 50))
    runs = [TokenRun(text_inputs(tmp_path / "engine", row.tolist()), ()) for row in ids]
    found = find_scales(plan, layer_inputs(tmp_path / "engine", runs, plan))

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    inputs: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, x, name=name: inputs.update({name: x[0].flatten(0, 1)})
            )
    model(torch.from_numpy(ids))
    assert len(found) == 4 * model.config.num_hidden_layers
    for each in found:
        layers = [model.get_submodule(layer) for layer in each.group.layers]
        exponent, scales = awq_scales(layers, inputs[each.group.layers[0]], TOP[kind])
        assert each.exponent == exponent, each.group.layers
        np.testing.assert_allclose(each.scales, scales.numpy(), rtol=1e-3)
    assert len({each.exponent for each in found}) > 3
