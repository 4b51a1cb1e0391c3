"""Masked language modelling in the style of HelloDeepSpeed, which goes on from a checkpoint."""

import pathlib
import tempfile

import deepspeed
import torch
from deepspeed.utils import logger
from torch import nn

WORDS, LENGTH, MASK, IGNORED = 50, 12, 3, -100


class Bert(nn.Module):
    """Two encoder layers over words and places."""

    def __init__(self, hidden=16):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, hidden), nn.Embedding(LENGTH, hidden)
        layer = nn.TransformerEncoderLayer(hidden, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, WORDS)

    def forward(self, src_tokens, tgt_tokens):
        x = self.words(src_tokens) + self.places(torch.arange(LENGTH, device=src_tokens.device))
        logits = self.head(self.layers(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tgt_tokens.flatten(), ignore_index=IGNORED)


def batches(count):
    """Sentences that count upwards from anywhere, some of whose words are masked."""
    draw = torch.Generator().manual_seed(2)
    for _ in range(count):
        words = (torch.randint(WORDS, (8, 1), generator=draw) + torch.arange(LENGTH)) % WORDS
        masked = torch.rand(words.shape, generator=draw) < 0.3
        yield words.masked_fill(masked, MASK), words.masked_fill(~masked, IGNORED)


def create_engine():
    """An engine with ZeRO 1 and the optimizer's state on the host."""
    torch.manual_seed(0)
    model = Bert()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 5e-3}},
        "fp16": {"enabled": False},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def train(engine, data, folder, start, end):
    """Steps from `start` to `end`, with a checkpoint after the last."""
    losses = []
    for step, (src, tgt) in enumerate(data):
        if start <= step < end:
            loss = engine(src_tokens=src.to(engine.device), tgt_tokens=tgt.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.save_checkpoint(save_dir=folder, client_state={"checkpoint_step": end})
    return losses


if __name__ == "__main__":
    data, folder = list(batches(16)), pathlib.Path(tempfile.mkdtemp())
    losses = train(create_engine(), data, folder, 0, 10)
    engine = create_engine()
    _, client_state = engine.load_checkpoint(load_dir=folder)
    logger.info(f"continuing after step {client_state['checkpoint_step']}")
    losses += train(engine, data, folder, client_state["checkpoint_step"], 16)
    print("losses:", losses)
