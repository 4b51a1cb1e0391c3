"""Tensor slices of a model from transformers, by its family's rules, at ZeRO 1."""

import deepspeed
import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
)

if __name__ == "__main__":
    deepspeed.init_distributed()
    size = distributed.get_world_size()
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHAPE)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}},
        "tensor_parallel": {"autotp_size": size},
        "zero_optimization": {"stage": 1},
    }
    model = deepspeed.tp_model_init(model, tp_size=size, dtype=torch.float32)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    draw, losses = torch.Generator().manual_seed(4), []
    for _ in range(8):
        words = (torch.randint(64, (2, 1), generator=draw) + torch.arange(10)) % 64
        words = words.to(engine.device)
        loss = engine(input_ids=words, labels=words, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if engine.global_rank == 0:
        print("losses:", losses)
