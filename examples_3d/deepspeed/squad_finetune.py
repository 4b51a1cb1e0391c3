"""An encoder that learns to mark the answer in a text: bf16, warm-up and decay, accumulation, evaluation."""

import argparse

import deepspeed
import torch
from torch import nn


class Reader(nn.Module):
    """An encoder with two scores for each token: the answer begins there, or ends."""

    def __init__(self, words=40, size=32, length=12):
        super().__init__()
        self.words, self.places = nn.Embedding(words, size), nn.Embedding(length, size)
        layer = nn.TransformerEncoderLayer(size, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.scores = nn.Linear(size, 2)

    def forward(self, ids, answer=None):
        hidden = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        scores = self.scores(self.encoder(hidden)).float()
        if answer is None:
            return scores.argmax(1)
        return nn.functional.cross_entropy(scores, answer)


def questions(count, seed):
    """The answer runs from word 1 to word 2."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 40, (count, 12), generator=draw)
    answer = torch.stack(
        [torch.randint(0, 6, (count,), generator=draw), torch.randint(6, 12, (count,), generator=draw)], 1
    )
    ids.scatter_(1, answer, torch.tensor([1, 2]).expand(count, 2))
    return torch.utils.data.TensorDataset(ids, answer)


def main():
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Reader()
    decay = {"warmup_max_lr": 5e-3, "warmup_num_steps": 4, "total_num_steps": 40, "warmup_type": "linear"}
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Adam", "params": {"lr": 5e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": decay},
    }
    no_decay = [param for name, param in model.named_parameters() if name.endswith("bias")]
    rest = [param for name, param in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": rest, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}]
    del args.deepspeed_config
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=groups, training_data=questions(256, 1), config=config
    )
    losses = []
    for _ in range(2):
        for ids, answer in loader:
            loss = engine(ids, answer)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.eval()
    ids, answer = questions(64, 2).tensors
    with torch.no_grad():
        right = (engine(ids) == answer).float().mean().item()
    print(f"exact: {right:.2f}, rate: {engine.get_lr()[0]:.5f}")
    print("losses:", losses)


if __name__ == "__main__":
    main()
