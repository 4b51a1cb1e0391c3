"""megazero's GPT against transformers' GPT-2, Llama and Qwen2 with the same weights: logits and gradients."""

from __future__ import annotations

import pytest
import torch

from megazero.config.tree.model import ModelConfig
from megazero.inference.generate import generate
from megazero.inference.sampling import Sampling
from megazero.layers.collectives import gather_features
from megazero.layers.initialize import initialize
from megazero.layers.placement import Placement
from megazero.models.batch import Batch
from megazero.models.chunk import Slice
from megazero.models.gpt import GPT
from megazero.models.targets import Targets
from megazero.mpu.context import ParallelContext, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import spec_of
from megazero.mpu.rng import derive_key
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops.counter_random import normal
from megazero.spec.resolve import model_spec
from tests.models.hf_weights import (
    bloom_model,
    global_gradients,
    global_weights,
    gpt2_model,
    llama_model,
    mistral_model,
    qwen2_model,
    to_theirs,
)

pytest.importorskip("transformers")

VOCAB = (101, 128)  # entries, entries after padding
TOLERANCE = 1e-5

# Ragged on purpose: 6 heads of 7, an MLP that is not four times as wide, an epsilon that is no default.
GPT2 = ModelConfig(
    num_layers=3,
    hidden_size=42,
    num_attention_heads=6,
    seq_length=31,
    ffn_hidden_size=74,
    norm_epsilon=3e-4,
    init_method_std=0.08,
)
# Heads wider than hidden / heads, a base and an epsilon that are no defaults.
LLAMA = ModelConfig(
    num_layers=3,
    hidden_size=36,
    num_attention_heads=6,
    num_query_groups=2,
    kv_channels=10,
    seq_length=31,
    ffn_hidden_size=58,
    position_embedding_type="rope",
    rotary_base=500.0,
    normalization="RMSNorm",
    norm_epsilon=3e-4,
    activation="swiglu",
    add_bias_linear=False,
    init_method_std=0.08,
)
LLAMA_3 = {
    "use_rope_scaling": True,
    "rope_scaling_factor": 6.0,
    "rope_low_freq_factor": 0.5,
    "rope_high_freq_factor": 2.0,
    "rope_original_max_position_embeddings": 16,
}
YARN = {
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 16,
    "yarn_beta_fast": 2.0,
    "yarn_beta_slow": 0.1,
    "mscale": 0.8,
    "mscale_all_dim": 0.3,
}
BLOOM = GPT2.model_copy(
    update={"position_embedding_type": "alibi", "embed_layernorm": True, "ffn_hidden_size": None}
)
QWEN2 = LLAMA.model_copy(update={"kv_channels": None, "add_qkv_bias": True})
SOME = {"window_size": (4, -1), "window_attn_skip_freq": (1, 0, 1)}
UNTIED = {"untie_embeddings_and_output_weights": True}
SHAPES = {
    "gpt2": (GPT2, gpt2_model),
    "gpt2-untied": (GPT2.model_copy(update=UNTIED), gpt2_model),
    "gpt2-exact-gelu": (GPT2.model_copy(update={"activation": "gelu_exact"}), gpt2_model),
    "llama": (LLAMA.model_copy(update=UNTIED), llama_model),
    "llama-tied": (LLAMA, llama_model),
    "qwen2": (QWEN2, qwen2_model),
    "bloom": (BLOOM, bloom_model),
    "bloom-after-norm": (
        BLOOM.model_copy(update={**UNTIED, "apply_residual_connection_post_layernorm": True}),
        bloom_model,
    ),
    "mistral": (LLAMA.model_copy(update={"window_size": (3, 0)}), mistral_model),
    "qwen2-windows": (QWEN2.model_copy(update=SOME), qwen2_model),
    "llama-one-group": (LLAMA.model_copy(update={"num_query_groups": 1}), llama_model),
    "llama-linear": (LLAMA.model_copy(update={"rotary_seq_len_interpolation_factor": 3.0}), llama_model),
    "llama-3.1": (LLAMA.model_copy(update=LLAMA_3), llama_model),
    "llama-yarn": (LLAMA.model_copy(update=YARN), llama_model),
    "llama-all-groups": (LLAMA.model_copy(update={"num_query_groups": 6}), llama_model),
}
TOKENS = torch.randint(VOCAB[0], (3, 30), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def build(config: ModelConfig, context: ParallelContext) -> GPT:
    """Random everywhere, also where initial weights are ones and zeros, or a swap of two would not show."""
    model = GPT(Slice(model_spec(config), VOCAB, Placement.of(context, torch.float32)))
    initialize(model, 11, context.place)
    for parameter in model.parameters():
        spec = spec_of(parameter)
        if spec.init.kind != "normal":
            noise = normal(derive_key(11, "noise", spec.name), spec.shape, 0.1)
            parameter += spec.shard(noise, context.place)
    return model


def run_ours(config: ModelConfig, tp: int) -> tuple:
    """Logits [b, s, v], loss, weights and gradients by global name, and greedy tokens, on `tp` ranks."""
    world = ThreadWorld(tp)
    batch = Batch(TOKENS[:, :-1], Targets(TOKENS[:, 1:].contiguous()))

    def work(rank: int) -> tuple:
        context = thread_context(world, ProcessGrid(tp=tp), rank)
        model = build(config, context)
        with torch.no_grad():
            logits = gather_features(model(batch), context.tp)[..., : VOCAB[0]].transpose(0, 1)
        loss = model.run(batch).terms["lm"] / batch.counts["lm"]
        loss.backward()
        tokens = generate(model, TOKENS[:, :9].tolist(), max_new_tokens=12, sampling=Sampling(greedy=True))
        return (
            logits,
            loss.detach(),
            global_weights(model, context.groups),
            global_gradients(model, context.groups),
            tokens,
        )

    return world.run(work)[-1]


@pytest.mark.parametrize(
    ("shape", "tp"),
    [(shape, 1) for shape in SHAPES]
    + [("gpt2", 2), ("llama", 2), ("llama-tied", 2), ("qwen2", 2), ("mistral", 2), ("bloom", 2)],
)
def test_logits_loss_gradients_and_greedy_tokens_agree(shape, tp):
    config, make = SHAPES[shape]
    logits, loss, weights, gradients, tokens = run_ours(config, tp)
    theirs = make(config, VOCAB[0])
    # `strict` finds every weight that one side has and the other lacks.
    theirs.load_state_dict(to_theirs(weights, config, VOCAB[0]), strict=True)

    expected = theirs(TOKENS, labels=TOKENS)
    assert 0.3 < expected.logits.std() < 10  # neither dead nor saturated
    torch.testing.assert_close(logits, expected.logits[:, :-1].detach(), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(loss, expected.loss.detach(), atol=0, rtol=TOLERANCE)

    expected.loss.backward()
    renamed = to_theirs(gradients, config, VOCAB[0])
    for name, parameter in theirs.named_parameters():
        difference = (renamed[name] - parameter.grad).norm() / parameter.grad.norm()
        assert difference < TOLERANCE, f"gradient of {name} differs by {difference:.1e}"

    prompts = TOKENS[:, :9]
    alike = theirs.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert tokens == alike[:, 9:].tolist()
