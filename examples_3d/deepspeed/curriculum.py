"""A language model whose sequences grow while it learns, and which drops layers at random."""

import deepspeed
import torch
from torch import nn


class Model(nn.Module):
    """Is told how many tokens to use, and the share of layers to keep."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(16, 24)
        make = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(make(24, 2, 48, dropout=0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(24, 16)
        self.lengths, self.shares = [], []

    def forward(self, ids, curriculum_seqlen=None, progressive_layer_drop=False, pld_theta=1.0):
        ids = ids[:, : None if curriculum_seqlen is None else curriculum_seqlen + 1]
        self.lengths.append(ids.shape[1] - 1)
        self.shares.append(pld_theta)
        x, mask = self.words(ids[:, :-1]), nn.Transformer.generate_square_subsequent_mask(ids.shape[1] - 1)
        for number, layer in enumerate(self.layers):
            kept = 1 - (number + 1) / len(self.layers) * (1 - pld_theta)
            if not self.training or torch.rand(()) < kept:
                x = layer(x, src_mask=mask)
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), ids[:, 1:])


def main():
    torch.manual_seed(0)
    model = Model()
    config = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}},
        "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.05},
        "curriculum_learning": {
            "enabled": True,
            "curriculum_type": "seqlen",
            "min_difficulty": 4,
            "max_difficulty": 16,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 12, "difficulty_step": 4},
        },
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    ids = (torch.arange(17) + torch.arange(8)[:, None]) % 16
    losses = []
    for _ in range(16):
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert (model.lengths[0], model.lengths[-1]) == (4, 16), model.lengths
    assert 0.5 < model.shares[-1] < 0.9 < model.shares[0] == 1.0, model.shares
    print("losses:", losses)


if __name__ == "__main__":
    main()
