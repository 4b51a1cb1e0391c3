"""A transformer as a pipeline with tied embeddings and checkpoints, in the style of gpt-neox."""

import argparse
import tempfile

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

WORDS, LENGTH, HIDDEN = 32, 8, 16
CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 5e-3, "betas": [0.9, 0.95]}},
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
}


class Embedding(nn.Module):
    """Words and places; its weight makes the logits too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, HIDDEN) * 0.1)
        self.places = nn.Parameter(torch.zeros(LENGTH, HIDDEN))

    def forward(self, words):
        return nn.functional.embedding(words, self.weight) + self.places


class Block(nn.Module):
    """Causal attention and a perceptron."""

    def __init__(self, number):
        super().__init__()
        self.number, self.norm = number, nn.LayerNorm(HIDDEN)
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 32), nn.GELU(), nn.Linear(32, HIDDEN)
        )

    def forward(self, x):
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


def logits(embedding, x):
    """The words' weights again."""
    return x @ embedding.weight.t()


def loss_of(outputs, labels):
    """Of the word after each."""
    return nn.functional.cross_entropy(outputs[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def batches():
    draw = torch.Generator().manual_seed(9)
    while True:
        words = (torch.randint(WORDS, (2, 1), generator=draw) + torch.arange(LENGTH)) % WORDS
        yield words, words


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=2)
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    layers = [TiedLayerSpec("embed", Embedding), *(LayerSpec(Block, number) for number in range(3))]
    layers += [LayerSpec(nn.LayerNorm, HIDDEN), TiedLayerSpec("embed", Embedding, forward_fn=logits)]
    net = PipelineModule(layers, args.stages, loss_fn=loss_of, partition_method="type:Block|Embedding")
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)
    data = batches()
    losses = [float(engine.train_batch(data)) for _ in range(10)]
    folder = [tempfile.mkdtemp()]
    deepspeed.comm.broadcast_object_list(folder, src=0)
    engine.save_checkpoint(folder[0], client_state={"iteration": 10})
    _, state = engine.load_checkpoint(folder[0])
    losses.append(float(engine.eval_batch(data)))
    if engine.global_rank == 0:
        print("iteration:", state["iteration"], "losses:", losses)
