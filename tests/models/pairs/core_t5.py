"""Megatron-Core's T5 on the CPU: ``python -m tests.models.pairs.core_t5 FOLDER`` trains it.

It reads weights and samples from FOLDER/given.pt, and writes each step's loss to FOLDER/losses.pt. A process
of its own, as Megatron needs a process group of its own.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
from torch import Tensor

from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from tests.layouts.layout import Layout

STEPS, SAMPLES, WORDS, SENTINELS = 10, 8, 490, 20
VOCABULARY = WORDS + 2 + SENTINELS  # two for [BOS] and [EOS]
BLOCKS = {
    "embedding.word": "embedding.word_embeddings",
    "embedding.position": "embedding.position_embeddings",
    "encoder_norm": "encoder.final_layernorm",
    "final_norm": "decoder.final_layernorm",
    "head": "lm_head.output_layer",
}
PARTS = {
    "input_norm": "input_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.out": "self_attention.linear_proj",
    "cross_norm": "pre_cross_attn_layernorm",
    "cross.query": "cross_attention.linear_q",
    "cross.key_value": "cross_attention.linear_kv",
    "cross.out": "cross_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp.up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
}


def config_of() -> Config:
    """A T5 as Megatron-LM's: learned positions, tied embeddings, biases everywhere, GELU."""
    config = Layout(shape="t5-megatron", samples=SAMPLES, micro_batch=SAMPLES).config(STEPS)
    sizes = {"seq_length": 32, "t5_decoder_seq_length": 16, "vocab_size": VOCABULARY, "activation": "gelu"}
    rate = {"lr": 3e-3, "lr_decay_style": "constant", "lr_warmup_iters": 0}
    model, optimizer = config.model.model_copy(update=sizes), config.optimizer.model_copy(update=rate)
    return config.model_copy(update={"model": model, "optimizer": optimizer})


def name_in_core(name: str, encoder_layers: int) -> str:
    """Megatron-Core's name of a parameter of ours; the decoder has as many layers as the encoder."""
    block, _, kind = name.rpartition(".")
    if block in BLOCKS:
        return f"{BLOCKS[block]}.{kind}"
    _, number, part = block.split(".", 2)
    stack, place = divmod(int(number), encoder_layers)
    return f"{('encoder', 'decoder')[stack]}.layers.{place}.{PARTS[part]}.{kind}"


def build(model: ModelConfig) -> torch.nn.Module:
    """The T5 that Megatron-LM makes of this shape, without Transformer Engine; its stacks are alike."""
    from megatron.core.models.T5 import T5Model, t5_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=model.encoder_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.ffn_size,
        layernorm_epsilon=model.norm_epsilon,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=True,  # Megatron-LM's default, with GELU's approximation by tanh
        use_cpu_initialization=True,
    )
    encoder = t5_spec.get_t5_encoder_with_local_block_spec(config.num_layers)
    decoder = t5_spec.get_t5_decoder_with_local_block_spec(config.num_layers)
    encoder.layer_norm = decoder.layer_norm = t5_spec.LNImpl  # by default Transformer Engine's
    sizes = {"vocab_size": VOCABULARY, "max_sequence_length": model.positions}
    return T5Model(config, config, encoder, decoder, **sizes, share_embeddings_and_output_weights=True)


def loss_of(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean loss of the decoder's tokens, with Megatron-Core's own masks."""
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset

    texts = batch["tokens"], batch["decoder_tokens"]
    masks = T5MaskedWordPieceDataset.config_attention_mask(*texts, None, None, use_local=True)
    losses = model(*texts, *masks, lm_labels=batch["labels"])
    return (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()


def main(folder: Path) -> None:
    """Train with torch's AdamW, one step for each batch."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.cuda.current_device = lambda: torch.device("cpu")  # where it puts buffers
    get_cuda_rng_tracker().fork = contextlib.nullcontext  # it keeps CUDA's random states, for dropout
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config, given = config_of(), torch.load(folder / "given.pt")
    model, rate = build(config.model), config.optimizer
    parameters = dict(model.named_parameters())
    assert parameters.keys() == given["weights"].keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(given["weights"][name].view_as(parameter))
    decayed = [p for p in parameters.values() if p.dim() > 1]
    others = [p for p in parameters.values() if p.dim() == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    betas = rate.adam_beta1, rate.adam_beta2
    adamw = torch.optim.AdamW(groups, rate.lr, betas, rate.adam_eps, rate.weight_decay)
    losses = []
    for batch in given["batches"]:
        loss = loss_of(model, batch)
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), rate.clip_grad)
        adamw.step()
        losses.append(loss.item())
    torch.save(losses, folder / "losses.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
