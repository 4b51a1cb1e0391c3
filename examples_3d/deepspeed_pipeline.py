"""A pipeline in the style of GPT-NeoX: tied embedding and head, hidden states and a mask between the stages.

It is written for DeepSpeed, which runs it too. Two stages of one pipeline on a CPU, or two pipelines of two:

    megazero run --nproc_per_node 2 examples_3d/deepspeed_pipeline.py --stages 2
    megazero run --nproc_per_node 4 examples_3d/deepspeed_pipeline.py --stages 2 --zero 3
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

VOCABULARY, LENGTH, WIDTH, HEADS = 32, 16, 32, 4


class EmbeddingPipe(nn.Module):
    """From tokens, positions and a mask to hidden states and the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Look up tokens [b, s] and positions [b, s]; the mask [s, s] is passed on."""
        tokens, positions, mask = given
        return self.word(tokens) + self.position(positions), mask

    @property
    def weight(self) -> Tensor:
        """The weight that the head shares."""
        return self.word.weight


class ParallelTransformerLayerPipe(nn.Module):
    """Attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Hidden states [b, s, h] and the mask [s, s], True where a position is not seen."""
        x, mask = given
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=~mask)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x)))), mask


class NormPipe(nn.Module):
    """The last norm, which leaves the mask behind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        """Hidden states [b, s, h]."""
        return self.norm(given[0])


def head(embedding: EmbeddingPipe, x: Tensor) -> Tensor:
    """Logits by the embedding's weight."""
    return F.linear(x, embedding.weight)


def masked_loss(logits: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of the labels [b, s] where the mask [b, s] is 1."""
    labels, mask = given
    losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def layers(count: int) -> list[Any]:
    """The model as a row of layers."""
    return [
        TiedLayerSpec("embed", EmbeddingPipe, tied_weight_attr="word.weight"),
        *[LayerSpec(ParallelTransformerLayerPipe) for _ in range(count)],
        LayerSpec(NormPipe),
        TiedLayerSpec("embed", EmbeddingPipe, forward_fn=head, tied_weight_attr="word.weight"),
    ]


def samples(replica: int, micro_batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Sequences that count up from a random number, modulo the vocabulary."""
    generator = torch.Generator().manual_seed(replica)
    while True:
        start = torch.randint(VOCABULARY, (micro_batch_size, 1), generator=generator)
        yield {"text": (start + torch.arange(LENGTH + 1)) % VOCABULARY}


def get_batch_pipe(data: dict[str, Tensor]) -> tuple[Any, Any]:
    """From a sample to what the first and the last stage read."""
    tokens, labels = data["text"][:, :-1].contiguous(), data["text"][:, 1:].contiguous()
    positions = torch.arange(LENGTH).expand_as(tokens).contiguous()
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return (tokens, positions, mask), (labels, torch.ones(labels.shape))


def main() -> None:
    """Train, and evaluate at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages")
    parser.add_argument("--layers", type=int, default=4, help="transformer layers")
    parser.add_argument("--zero", type=int, default=1, help="stage of ZeRO; DeepSpeed takes 0 and 1")
    parser.add_argument("--save", help="folder for a checkpoint at the end")
    parser.add_argument("--load", help="folder of a checkpoint to continue from")
    parser.add_argument("--local_rank", type=int, default=0, help="given by some launchers")
    args = parser.parse_args()

    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    replicas = torch.distributed.get_world_size() // args.stages if torch.distributed.is_initialized() else 1
    model = PipelineModule(
        layers=layers(args.layers),
        topology=PipeModelDataParallelTopology(num_pp=args.stages, num_mp=1, num_dp=replicas),
        loss_fn=masked_loss,
        seed_layers=True,
        partition_method="type:transformer",
    )
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 32,
        "gradient_clipping": 1.0,
        "steps_per_print": 1000000,
        "zero_optimization": {"stage": args.zero},
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 3e-3}},
    }
    params = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=params)
    engine.set_batch_fn(get_batch_pipe)
    if args.load is not None:
        engine.load_checkpoint(args.load)

    data = samples(engine.grid.get_data_parallel_rank(), engine.train_micro_batch_size_per_gpu())
    while engine.global_steps < args.steps:
        loss = engine.train_batch(data_iter=data)
        if engine.global_rank == 0:
            print(f"step {engine.global_steps} loss {loss.item():.6f}", flush=True)
    loss = engine.eval_batch(data_iter=data)
    if engine.global_rank == 0:
        print(f"evaluation loss {loss.item():.6f}", flush=True)
    if args.save is not None:
        engine.save_checkpoint(args.save)


if __name__ == "__main__":
    main()
