"""Batches of about as many tokens each, whose learning rate follows the number of samples."""

import deepspeed
import torch
from deepspeed.runtime.data_pipeline.data_sampling import variable_batch_size_and_lr as variable
from torch import nn

CONFIG = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    "data_efficiency": {
        "enabled": True,
        "seed": 42,
        "data_sampling": {
            "num_workers": 0,
            "dynamic_batching": {
                "enabled": True,
                "lr_scaling_method": "linear",
                "min_batch_size": 1,
                "max_batch_size": 10,
                "sequence_picking_order": "dataloader",
                "max_tokens": 24,
            },
        },
    },
}

if __name__ == "__main__":
    deepspeed.init_distributed()
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(2)
    lengths = torch.randint(2, 10, (24,), generator=draw).tolist()
    dataset = [torch.randn(length, 4, generator=draw) for length in lengths]
    model = nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    loader, schedule, _ = variable.get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
        dataset=dataset,
        dataset_seqlens=lengths,
        engine=engine,
        dataloader_collate_fn=lambda samples: nn.utils.rnn.pad_sequence(samples, batch_first=True),
        sample_padding_fn=lambda sample, size: nn.functional.pad(sample, (0, 0, 0, size - len(sample))),
    )
    engine.lr_scheduler, losses = schedule, []
    for batch in loader:
        x = batch.to(engine.device)
        loss = (engine(x)[..., 0] - x.sum(-1)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    print("losses:", losses)
