# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers match those of transformers.

States and outputs match for any number of tokens and any cut into runs.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from edgellm_ros.builder.lowering.standard.delta_net import delta_net_layer  # noqa: E402
from edgellm_ros.builder.lowering.standard.mamba2 import mamba2_layer  # noqa: E402
from edgellm_ros.builder.lowering.standard.recurrent import CHUNK  # noqa: E402
from edgellm_ros.builder.model.recurrent import DeltaNet, Mamba2  # noqa: E402
from edgellm_ros.engine_directory.recurrent_config import RecurrentConfig  # noqa: E402
from fixtures.layer_graph import LayerRun, write_layer  # noqa: E402

TOLERANCE = 1e-3
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK)


def mamba2_case(seed: int):
    """Make a random Mamba2 layer of transformers and the same layer of ours."""
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    groups = int(rng.choice([1, 2, 4]))
    mamba = Mamba2(
        hidden_size=int(rng.integers(3, 9)) * 8,
        heads=groups * int(rng.integers(1, 4)),
        head_dim=int(rng.integers(2, 6)) * 4,
        groups=groups,
        state_size=int(rng.integers(2, 5)) * 8,
        conv_kernel=int(rng.integers(2, 6)),
        conv_bias=bool(rng.integers(2)),
        bias=bool(rng.integers(2)),
        epsilon=1e-5,
        time_step_min=0.001,
    )
    config = NemotronHConfig(
        hidden_size=mamba.hidden_size, mamba_num_heads=mamba.heads, mamba_head_dim=mamba.head_dim,
        n_groups=groups, ssm_state_size=mamba.state_size, conv_kernel=mamba.conv_kernel,
        use_conv_bias=mamba.conv_bias, use_bias=mamba.bias, layer_norm_epsilon=mamba.epsilon,
        chunk_size=int(rng.choice([16, 100, 128])), layers_block_type=["linear_attention"],
    )  # fmt: skip
    module = NemotronHMamba2Mixer(config, 0).eval()
    with torch.no_grad():
        module.A_log.uniform_(-2, 2.5)
        module.dt_bias.uniform_(-5, 1)
        module.D.normal_()
        module.norm.weight.normal_(1, 0.3)
        if mamba.bias:
            module.in_proj.bias.normal_(0, 0.3)
    recurrent = RecurrentConfig(
        "mamba2", 1, mamba.heads, mamba.state_size, mamba.head_dim, mamba.conv_dim, mamba.conv_kernel
    )
    return module, config, recurrent, mamba.hidden_size, partial(mamba_layer, mamba)


def mamba_layer(mamba, graph, tokens, chunks, x, state):
    return mamba2_layer(graph, mamba, tokens, chunks, x, state)


def delta_net_case(seed: int):
    """Make a random gated delta net of transformers and the same layer of ours."""
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    key_heads = int(rng.integers(1, 4))
    net = DeltaNet(
        hidden_size=int(rng.integers(3, 9)) * 8,
        key_heads=key_heads,
        value_heads=key_heads * int(rng.integers(1, 4)),
        key_dim=int(rng.integers(1, 5)) * 8,
        value_dim=int(rng.integers(1, 5)) * 8,
        conv_kernel=int(rng.integers(2, 6)),
        epsilon=1e-6,
    )
    config = Qwen3_5TextConfig(
        hidden_size=net.hidden_size, linear_num_key_heads=key_heads, linear_num_value_heads=net.value_heads,
        linear_key_head_dim=net.key_dim, linear_value_head_dim=net.value_dim,
        linear_conv_kernel_dim=net.conv_kernel, rms_norm_eps=net.epsilon, num_hidden_layers=1,
        layer_types=["linear_attention"],
    )  # fmt: skip
    module = Qwen3_5GatedDeltaNet(config, 0).eval()
    with torch.no_grad():
        module.A_log.uniform_(-6, 2)
        module.dt_bias.uniform_(-5, 1)
        module.norm.weight.normal_(1, 0.3)
        for name in ("in_proj_qkv", "in_proj_b", "in_proj_a"):
            getattr(module, name).weight.mul_(2)
    recurrent = RecurrentConfig(
        "gated_delta_net", 1, net.value_heads, net.key_dim, net.value_dim, net.conv_dim, net.conv_kernel
    )
    return module, config, recurrent, net.hidden_size, partial(net_layer, net)


def net_layer(net, graph, tokens, chunks, x, state):
    return delta_net_layer(graph, net, tokens=tokens, chunks=chunks, x=x, state=state, max_tokens=448)


CASES = {f"mamba2-{seed}": partial(mamba2_case, seed) for seed in range(8)}
CASES |= {f"delta_net-{seed}": partial(delta_net_case, seed) for seed in range(8)}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request, tmp_path_factory):
    module, config, recurrent, hidden, layer = request.param()
    tensors = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    path = tmp_path_factory.mktemp("layer") / "model.onnx"
    write_layer(path, tensors, recurrent, hidden, layer)

    def reference(x: np.ndarray) -> np.ndarray:
        from transformers.cache_utils import DynamicCache

        with torch.no_grad():
            return module(torch.from_numpy(x), cache_params=DynamicCache(config=config)).numpy()

    def start(batch: int) -> LayerRun:
        return LayerRun(path, recurrent, batch)

    def tokens(batch: int, count: int) -> np.ndarray:
        rng = np.random.default_rng(count)
        return rng.standard_normal((batch, count, hidden)).astype(np.float32)

    return reference, start, tokens


@pytest.mark.parametrize("count", LENGTHS)
def test_a_prompt_gives_the_outputs_of_transformers(case, count):
    reference, start, tokens = case
    x = tokens(2, count)
    expected = reference(x)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(start(2)(x), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("first", LENGTHS)
def test_single_tokens_after_a_prompt_give_the_outputs_of_one_long_prompt(case, first):
    reference, start, tokens = case
    x = tokens(2, first + 5)
    run = start(2)
    parts = [run(x[:, :first]), *(run(x[:, i : i + 1]) for i in range(first, first + 5))]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), reference(x), atol=TOLERANCE, rtol=0)


def test_padding_leaves_outputs_and_state_of_each_sequence_to_the_last_bit(case):
    _, start, tokens = case
    x, counts = tokens(4, 2 * CHUNK + 7), [0, 1, CHUNK, 2 * CHUNK + 3]
    run = start(4)
    run(x[:, :9])
    before, conv_before = run.state.copy(), run.conv.copy()
    y = run(x, counts)
    for row, count in enumerate(counts[1:], 1):
        alone = start(1)
        alone(x[row : row + 1, :9])
        expected = alone(x[row : row + 1, : max(2, count)], [count])  # one token is a chunk of its own
        np.testing.assert_array_equal(y[row, :count], expected[0, :count])
        np.testing.assert_array_equal(run.conv[row], alone.conv[0])
        np.testing.assert_array_equal(run.state[row], alone.state[0])
    np.testing.assert_array_equal(run.state[0], before[0])
    np.testing.assert_array_equal(run.conv[0], conv_before[0])


def test_equal_tokens_do_not_amplify_rounding(case):
    """Keys that repeat make the delta rule's system as ill-conditioned as it gets."""
    reference, start, tokens = case
    x = np.repeat(tokens(2, 1), 3 * CHUNK, axis=1)
    np.testing.assert_allclose(start(2)(x), reference(x), atol=TOLERANCE, rtol=0)
