# SPDX-License-Identifier: Apache-2.0
"""Scales of `edgellm export --calibrate` against those of AWQ's searches.

The searches are in PyTorch, on transformers' model.
"""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.builder.exporter.calibration import find_scales, plan_calibration  # noqa: E402
from edgellm_ros.builder.exporter.options import ExportOptions  # noqa: E402
from edgellm_ros.cli.quantization.calibration import layer_inputs  # noqa: E402
from edgellm_ros.cli.quantization.token_runs import TokenRun, text_inputs  # noqa: E402
from fixtures.outlier_checkpoint import write_outlier_checkpoint  # noqa: E402

CUT = {"v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
GROUP, TOP = 32, {"int4": 7, "int8": 127}


def rounded(weight: torch.Tensor, top: int, share: float = 1.0) -> torch.Tensor:
    """Round to 8 bits as llm-awq's `pseudo_quantize_tensor`, to 4 as GGUF's Q4_0.

    In Q4_0 the value of the largest magnitude is -8 steps. share: of the steps.
    """
    blocks = weight.reshape(len(weight), -1, GROUP)
    where = blocks.abs().argmax(-1, keepdim=True)
    steps = blocks.gather(-1, where) / -8 if top == 7 else blocks.abs().amax(-1, keepdim=True) / top
    steps = steps * share
    return (torch.clamp(torch.round(blocks / steps), -top - 1, top) * steps).reshape(weight.shape)


def awq_scales(layers: list[torch.nn.Linear], x: torch.Tensor, top: int) -> tuple[float, torch.Tensor]:
    """The search of llm-awq's `auto_scale_block`; x [T,K]."""
    magnitudes, best = x.abs().mean(0), (float("inf"), 0.0, x)
    for step in range(20):
        scales = magnitudes.pow(step / 20).clamp(min=1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        loss = sum(
            ((x @ layer.weight.T - (x / scales) @ rounded(layer.weight * scales, top).T) ** 2).sum().item()
            for layer in layers
        )
        best = min(best, (loss, step / 20, scales), key=lambda found: found[0])
    return best[1], best[2]


def awq_shares(weight: torch.Tensor, x: torch.Tensor, top: int) -> torch.Tensor:
    """Search the share of its largest magnitude that each group keeps [N,K/group].

    The search is that of llm-awq's `auto_clip_layer`.
    """
    blocks, rows = weight.reshape(len(weight), -1, GROUP), x.reshape(len(x), -1, GROUP)
    expected = torch.einsum("tgi,ngi->tng", rows, blocks)
    best, fewest = torch.ones(blocks.shape[:2]), torch.full(blocks.shape[:2], float("inf"))
    for step in range(10):
        share = 1 - step / 20
        found = torch.einsum("tgi,ngi->tng", rows, rounded(weight, top, share).reshape(blocks.shape))
        errors = ((found - expected) ** 2).mean(0)
        best = torch.where(errors < fewest, share, best)
        fewest = torch.minimum(fewest, errors)
    return best


@pytest.mark.parametrize("kind", TOP)
@torch.no_grad()
def test_scales_and_shares_are_those_of_awqs_searches(tmp_path, kind):
    checkpoint = write_outlier_checkpoint(tmp_path / "checkpoint", num_key_value_heads=4)
    options = ExportOptions(quantize=kind, group_size=GROUP, max_lora_rank=0)
    plan = plan_calibration(checkpoint, options)
    export(checkpoint, tmp_path / "engine", plan.options)
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
        for name, layer in zip(each.group.layers, layers, strict=True):
            if name in each.kept:
                x = inputs[each.group.layers[0]] / scales
                shares = awq_shares(layer.weight * scales, x, TOP[kind]).numpy()
                assert (np.abs(each.kept[name] - shares) < 1e-3).mean() > 0.99, name  # ties differ
    assert {name.rpartition(".")[2] for each in found for name in each.kept} == CUT
    assert len({each.exponent for each in found}) > 3
