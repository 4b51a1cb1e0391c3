"""A vision transformer whose middle blocks see a growing share of the patches."""

import deepspeed
import torch
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd, save_without_random_ltd
from torch import nn


class Block(nn.Module):
    """Attention and an MLP, both with a residual."""

    def __init__(self, size=24):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(size), nn.MultiheadAttention(size, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 48), nn.GELU(), nn.Linear(48, size))

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 24, 4, stride=4)
        self.places = nn.Parameter(0.02 * torch.randn(16, 24))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(24, 4)

    def forward(self, images, labels):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels)


LTD = {
    "enabled": True,
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [1, 2],
    "model_mask_name": None,
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 4,
        "max_value": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 12, "seq_per_step": 4},
    },
}


def main():
    torch.manual_seed(0)
    model = ViT()
    names = sorted(model.state_dict())
    config = {
        "train_batch_size": 16,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}},
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": LTD}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine = convert_to_random_ltd(engine, Block)
    labels = torch.arange(16) % 4
    images = torch.randn(16, 1, 16, 16) + labels[:, None, None, None]
    losses, kept = [], []
    for _ in range(16):
        loss = engine(images, labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        kept.append(engine.random_ltd_scheduler.get_current_seq())
    assert (kept[0], kept[-1]) == (4, 16), kept
    assert sorted(save_without_random_ltd(engine)) == names
    print("losses:", losses)


if __name__ == "__main__":
    main()
