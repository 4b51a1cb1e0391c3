"""Hybrid models against transformers' Mamba-2 and Nemotron-H: logits, gradients and text."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.config.tree.model import ModelConfig
from megazero.inference.generate import generate
from megazero.inference.sampling import Sampling
from megazero.layers.collectives import gather_features
from megazero.layers.initialize import initialize
from megazero.layers.placement import Placement
from megazero.models.batch import Batch
from megazero.models.chunk import Slice
from megazero.models.gpt import GPT
from megazero.mpu.context import ParallelContext, solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import spec_of
from megazero.mpu.rng import derive_key
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops.counter_random import normal
from megazero.spec.resolve import model_spec
from tests.models.hf_weights import Weights, global_gradients, global_weights

pytest.importorskip("transformers")

VOCAB = (101, 128)
LENGTH = 21
COMMON = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": LENGTH,
    "ffn_hidden_size": 50,
    "normalization": "RMSNorm",
    "norm_epsilon": 3e-4,
    "activation": "squared_relu",
    "add_bias_linear": False,
    "position_embedding_type": "none",
    "init_method_std": 0.15,
    "mamba_state_dim": 7,
    "mamba_head_dim": 6,
    "mamba_num_groups": 2,
}
MAMBA2 = ModelConfig(**COMMON, hybrid_layer_pattern="MMM")
NEMOTRON = ModelConfig(
    **COMMON, hybrid_layer_pattern="M-*MM-", mamba_num_heads=4, untie_embeddings_and_output_weights=True
)
SHAPES = pytest.mark.parametrize("config", [MAMBA2, NEMOTRON], ids=["mamba2", "nemotron"])


def theirs_of(config: ModelConfig) -> nn.Module:
    import transformers

    common = {
        "vocab_size": VOCAB[0],
        "hidden_size": config.hidden_size,
        "n_groups": config.mamba_num_groups,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 8,  # several of them, and one that is not full
        "layer_norm_epsilon": config.norm_epsilon,
        **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
    }
    if config is MAMBA2:
        shape = transformers.Mamba2Config(
            num_hidden_layers=config.num_layers,
            num_heads=config.mamba_heads,
            head_dim=config.mamba_head_dim,
            state_size=config.mamba_state_dim,
            tie_word_embeddings=True,
            residual_in_fp32=False,
            **common,
        )
        return transformers.Mamba2ForCausalLM(shape).eval()
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    shape = transformers.NemotronHConfig(
        layers_block_type=[kinds[letter] for letter in config.layer_kinds or ""],
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.ffn_size,
        mamba_num_heads=config.mamba_heads,
        mamba_head_dim=config.mamba_head_dim,
        ssm_state_size=config.mamba_state_dim,
        time_step_min=1e-30,  # below which their scan of many rows raises steps, and that of one does not
        **common,
    )
    return transformers.NemotronHForCausalLM(shape).eval()


def by_kind(grouped: Tensor, config: ModelConfig, *, gated: bool) -> Tensor:
    """A tensor [g, ...] of ours, with what a group has side by side, as theirs: kind after kind."""
    width = config.mamba_width // config.mamba_num_groups
    heads = (config.mamba_heads or 0) // config.mamba_num_groups
    n = config.mamba_state_dim
    sizes = (width, width, n, n, heads) if gated else (width, n, n)
    return torch.cat([part.flatten(0, 1) for part in grouped.split(sizes, 1)])


def as_theirs(weights: Weights, config: ModelConfig) -> Weights:
    base = "backbone" if config is MAMBA2 else "model"
    out = {f"{base}.embeddings.weight": weights["embedding.word.weight"]}
    out[f"{base}.norm_f.weight"] = weights["final_norm.weight"]
    out["lm_head.weight"] = weights.get("head.weight", weights["embedding.word.weight"])
    for i, letter in enumerate(config.layer_kinds or ""):
        layer, ours = f"{base}.layers.{i}", f"layers.{i}"
        out[f"{layer}.norm.weight"] = weights[f"{ours}.input_norm.weight"]
        if letter == "-":
            for name, own in (("up_proj", "up"), ("down_proj", "down")):
                out[f"{layer}.mixer.{name}.weight"] = weights[f"{ours}.mlp.{own}.weight"]
        elif letter == "*":
            qkv = weights[f"{ours}.attention.qkv.weight"]
            for name, part in (("q", qkv[:, :-2]), ("k", qkv[:, -2:-1]), ("v", qkv[:, -1:])):
                out[f"{layer}.mixer.{name}_proj.weight"] = part.flatten(0, 2)
            out[f"{layer}.mixer.o_proj.weight"] = weights[f"{ours}.attention.out.weight"]
        else:
            mixer = {name: weights[f"{ours}.mamba.{name}"] for name in ("input.weight", "conv.weight")}
            out[f"{layer}.mixer.in_proj.weight"] = by_kind(mixer["input.weight"], config, gated=True)
            out[f"{layer}.mixer.conv1d.weight"] = by_kind(
                mixer["conv.weight"], config, gated=False
            ).unsqueeze(1)
            out[f"{layer}.mixer.conv1d.bias"] = by_kind(
                weights[f"{ours}.mamba.conv.bias"], config, gated=False
            )
            names = (
                ("dt_bias", "dt_bias"),
                ("A_log", "a_log"),
                ("D", "skip"),
                ("norm.weight", "norm.weight"),
            )
            for name, own in names:
                out[f"{layer}.mixer.{name}"] = weights[f"{ours}.mamba.{own}"].flatten()
            out[f"{layer}.mixer.out_proj.weight"] = weights[f"{ours}.mamba.output.weight"]
    return out


def build(config: ModelConfig, context: ParallelContext) -> GPT:
    """Initial weights, and other numbers where those are ones."""
    model = GPT(Slice(model_spec(config), VOCAB, Placement.of(context, torch.float32)))
    initialize(model, 3, context.place)
    with torch.no_grad():
        for parameter in model.parameters():
            spec = spec_of(parameter)
            if spec.init.kind == "ones":
                noise = torch.empty(spec.shape)
                noise.copy_(normal(derive_key(5, spec.name), spec.shape, 0.3, torch.float32, noise.device))
                parameter.copy_(1 + spec.shard(noise, context.place))
    return model


def tokens() -> Tensor:
    torch.manual_seed(0)
    return torch.randint(VOCAB[0], (2, LENGTH))


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())


@SHAPES
@pytest.mark.parametrize("tp", [1, 2])
def test_logits_and_gradients_are_theirs(config, tp):
    world = ThreadWorld(tp)

    def run(rank: int) -> tuple[Tensor, Weights, Weights]:
        context = thread_context(world, ProcessGrid(tp=tp), rank)
        model = build(config, context)
        logits = gather_features(model(Batch(tokens())), context.tp)[..., : VOCAB[0]].transpose(0, 1)
        loss_of(logits).backward()
        return logits.detach(), global_weights(model, context.groups), global_gradients(model, context.groups)

    logits, weights, gradients = world.run(run)[0]
    theirs = theirs_of(config)
    theirs.load_state_dict(as_theirs(weights, config))
    wanted = theirs(tokens()).logits
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)
    loss_of(wanted).backward()
    got = as_theirs(gradients, config)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


@SHAPES
def test_the_same_text(config):
    model = build(config, solo_context())
    theirs = theirs_of(config)
    theirs.load_state_dict(as_theirs(global_weights(model, solo_context().groups), config))
    prompt = tokens()[:1, :9]
    wanted = theirs.generate(prompt, max_new_tokens=8, do_sample=False)[0, 9:].tolist()
    assert generate(model, prompt.tolist(), max_new_tokens=8, sampling=Sampling(greedy=True)) == [wanted]
