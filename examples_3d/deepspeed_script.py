"""A training script in DeepSpeed's style: a small language model of plain torch layers learns to count.

Only the import differs from DeepSpeed. Run it in one process, or on two CPU ranks:

    python examples_3d/deepspeed_script.py --deepspeed_config examples_3d/ds_config_zero3.json
    torchrun --nproc_per_node 2 examples_3d/deepspeed_script.py \
        --deepspeed_config examples_3d/ds_config_zero3.json --save /tmp/counting
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import megazero as deepspeed

VOCABULARY, LENGTH = 32, 16


class Counting(Dataset):
    """Sequences that count up from a random number, modulo the vocabulary."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> Tensor:
        start = torch.randint(VOCABULARY, (1,), generator=torch.Generator().manual_seed(index))
        return (start + torch.arange(LENGTH + 1)) % VOCABULARY


class Model(nn.Module):
    """Embeddings, transformer layers, and the embedding's weight again for the logits."""

    def __init__(self, width: int = 32, layers: int = 2):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Loss of the next-token prediction; tokens [b, s + 1]."""
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        x = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    """Train for one epoch, or as many steps as asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--save", help="folder for a checkpoint at the end")
    parser.add_argument("--load", help="folder of a checkpoint to continue from")
    parser.add_argument("--local_rank", type=int, default=0, help="given by some launchers")
    args = deepspeed.add_config_arguments(parser).parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(1234)
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
        model = Model()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Counting()
    )
    if args.load is not None:
        engine.load_checkpoint(args.load)

    batches = iter(loader)
    while engine.global_steps < args.steps:
        tokens = next(batches).to(engine.device)
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0 and engine.was_step_applied():
            print(f"step {engine.global_steps} loss {loss.item():.6f}", flush=True)
    if args.save is not None:
        engine.save_checkpoint(args.save, client_state={"steps": args.steps})


if __name__ == "__main__":
    main()
