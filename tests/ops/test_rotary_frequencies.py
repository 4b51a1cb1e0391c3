"""Scaled rotary frequencies: literal values by the papers, those of transformers, and angles far out."""

from __future__ import annotations

import math

import pytest
import torch

from megazero.config.tree.model import ModelConfig
from megazero.layers.rotary import MOST_POSITIONS_IN_FP32, rotary_of, rotary_scaling
from megazero.ops.rotary import rotary_table
from megazero.ops.rotary_frequencies import (
    LinearScaling,
    Llama3Scaling,
    YarnScaling,
    rotary_frequencies,
    yarn_magnitude,
)
from megazero.spec.resolve import model_spec
from tests.models.hf_weights import rope_scaling
from tests.tables import over_table

CPU = torch.device("cpu")
SCALED = {
    "linear": {"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": 4.0},
    "llama-3.1": {"position_embedding_type": "rope", "use_rope_scaling": True},
    "yarn": {"position_embedding_type": "yarn", "rotary_scaling_factor": 16.0},
    "yarn-between-channels": {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": 40.0,
        "yarn_original_max_position_embeddings": 2048,
        "yarn_beta_fast": 20.0,
        "yarn_beta_slow": 2.0,
        "yarn_correction_range_round_to_int": False,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
    },
}


def frequencies(scaling, dim=8, base=10000.0):
    return rotary_frequencies(dim, base, torch.float64, CPU, scaling).tolist()


def shape(**settings):
    return ModelConfig(
        num_layers=1, hidden_size=256, num_attention_heads=2, seq_length=64, rotary_base=5e5, **settings
    )


def test_plain_and_interpolated():
    assert frequencies(LinearScaling()) == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert frequencies(LinearScaling(4.0)) == pytest.approx([0.25, 0.025, 0.0025, 0.00025])


def test_llama_3_keeps_fast_channels_and_slows_slow_ones():
    """In 2 pi x 100 tokens the four pairs turn 100, 10, 1 and 0.1 times."""
    length = round(2 * math.pi * 100)
    kept, mixed, slow, slowest = frequencies(Llama3Scaling(8.0, 2.0, 20.0, length))
    assert kept == pytest.approx(1.0)
    share = (10 - 2) / (20 - 2)
    assert mixed == pytest.approx(0.1 * share + 0.1 / 8 * (1 - share), rel=1e-3)
    assert (slow, slowest) == pytest.approx((0.01 / 8, 0.001 / 8))


@pytest.mark.parametrize(("whole_channels", "width"), [(True, 3.0), (False, 2.5)])
def test_yarn_ramps_over_channels(whole_channels, width):
    """Pair 0 turns 100 times, and halfway between pairs 2 and 3 it would be 10^-0.5 times."""
    length = round(2 * math.pi * 100)
    scaled = frequencies(YarnScaling(8.0, length, 100.0, 10**-0.5, whole_channels, 1.0))
    for i, plain in enumerate((1.0, 0.1, 0.01, 0.001)):
        share = min(i / width, 1.0)
        assert scaled[i] == pytest.approx(plain * (1 - share) + plain / 8 * share, rel=1e-3)


def test_yarn_sharpens_attention():
    assert yarn_magnitude(1.0, 1.0, 0.0) == 1.0
    assert yarn_magnitude(16.0, 1.0, 0.0) == pytest.approx(1.2772588722)
    assert yarn_magnitude(16.0, 1.0, 1.0) == 1.0
    scaling = YarnScaling(16.0, 4096, 32.0, 1.0, True, 1.25)
    cos, sin = rotary_table(torch.arange(9), 8, 1e4, scaling=scaling)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, 1.25**2))


@over_table("kind", SCALED)
def test_transformers_has_the_same_frequencies(kind):
    pytest.importorskip("transformers", minversion="5")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = shape(**SCALED[kind])
    described = {**rope_scaling(config), "rope_theta": 5e5}
    theirs = LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=described
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS[described["rope_type"]](theirs, CPU)
    (spec,) = model_spec(config).rotary
    scaling = rotary_scaling(spec.scaling)
    ours = rotary_frequencies(spec.channels, 5e5, torch.float32, CPU, scaling)
    torch.testing.assert_close(ours, expected, rtol=2e-7, atol=0)
    assert scaling.magnitude == pytest.approx(magnitude, rel=1e-12)


@over_table("at", [131_072, 2**20, 2**24 + 1])
def test_angles_far_out_are_exact(at):
    """In fp32 they are wrong by 0.009, 0.07 and up to 1.1 rad."""
    config = shape(position_embedding_type="rope", max_position_embeddings=2**25)
    cos, sin = rotary_of(model_spec(config).rotary, torch.tensor([at]))
    angles = [math.remainder(at * 5e5 ** (-i / 64), 2 * math.pi) for i in range(64)]
    off = torch.atan2(sin.double(), cos.double()).flatten() - torch.tensor(angles, dtype=torch.float64)
    # The wrap from pi to -pi is no difference.
    assert torch.remainder(off + math.pi, 2 * math.pi).sub(math.pi).abs().max() < 1e-6


def test_models_as_short_as_published_ones_compute_angles_as_those_do():
    long, short = (
        shape(position_embedding_type="rope", max_position_embeddings=most)
        for most in (MOST_POSITIONS_IN_FP32 + 1, MOST_POSITIONS_IN_FP32)
    )
    positions = torch.tensor([131_000])
    expected = (positions * (1.0 / 5e5 ** (torch.arange(0, 128, 2).float() / 128))).cos()
    assert torch.equal(rotary_of(model_spec(short).rotary, positions)[0].flatten(), expected)
    assert (rotary_of(model_spec(long).rotary, positions)[0].flatten() - expected).abs().max() > 1e-4
