"""Sequences that two ranks share through accelerate: ``FILE STAGE`` gets the losses at a stage of ZeRO."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed.nn.functional as differentiable
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, VOCABULARY, RANKS = 16, 31, 2
SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": VOCABULARY}


def samples() -> list[dict[str, torch.Tensor]]:
    rows = [(number + torch.arange(LENGTH)) % VOCABULARY for number in range(8)]
    return [{"input_ids": ids, "position_ids": torch.arange(LENGTH), "labels": ids} for ids in rows]


def train(stage: int) -> list[float]:
    """The losses of an epoch."""
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa", sp_seq_length=LENGTH)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1.0),
        parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=RANKS, sp_handler=handler),
    )
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, **heads, attn_implementation="sdpa"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=1))
    group, losses = torch.distributed.group.WORLD, []
    for batch in loader:
        labels = batch.pop("shift_labels")
        logits = model(**batch, use_cache=False).logits
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = torch.stack(differentiable.all_gather(total, group=group)).sum() / (LENGTH - 1)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    PartialState(cpu=True)
    stage = int(sys.argv[2])
    found = train(stage)
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
