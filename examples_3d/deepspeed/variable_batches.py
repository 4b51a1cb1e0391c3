"""Sequences of many lengths in batches of about as many tokens; the learning rate follows their number."""

import deepspeed
import torch
from deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import (
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed as variable_batches,
)
from torch import nn


class Texts(torch.utils.data.Dataset):
    """Counting, from a random number on."""

    def __init__(self):
        draw = torch.Generator().manual_seed(1)
        self.lengths = torch.randint(2, 16, (120,), generator=draw).tolist()
        self.starts = torch.randint(0, 8, (120,), generator=draw).tolist()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, number):
        return (torch.arange(self.lengths[number] + 1) + self.starts[number]) % 8


def collate(texts):
    return nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-100)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8))
    batching = {"enabled": True, "max_tokens": 40, "lr_scaling_method": "sqrt", "metrics_path": "none"}
    batching["sequence_picking_order"] = "seqlen"
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.02, "torch_adam": True}},
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {"enabled": True, "dynamic_batching": batching},
        },
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    texts = Texts()
    loader, engine.lr_scheduler, _ = variable_batches(
        dataset=texts, engine=engine, dataset_seqlens=texts.lengths, dataloader_collate_fn=collate
    )
    losses = []
    for _ in range(2):
        for batch in loader:
            logits = engine(batch[:, :-1].clamp(min=0)).transpose(1, 2)
            loss = nn.functional.cross_entropy(logits, batch[:, 1:])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    print("losses:", losses)


if __name__ == "__main__":
    main()
