"""What codes on the wire do to a training: losses of a GPT on this repository's pages, beside exact ones.

    python proofs/quantized_losses.py --steps 200

Tokens are bytes; the ranks are four threads on two nodes, at stage 3. Initial weights follow from a seed and
samples from the step, so the rows differ by their communication alone.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from megazero.config.tree.model import ModelConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.layers.initialize import initialize
from megazero.layers.placement import Placement
from megazero.models.batch import Batch
from megazero.models.chunk import Slice
from megazero.models.gpt import GPT
from megazero.models.targets import Targets
from megazero.mpu.context import ParallelContext, solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops.quantize import Quantization
from megazero.optim.elementwise import Adam
from megazero.spec.resolve import model_spec
from megazero.zero.build import build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.parallel import DataParallel
from megazero.zero.policy import Codes, GatherPolicy, ZeroPolicy
from megazero.zero.unit import Unit

RANKS, SAMPLES, LENGTH, TOKENS = 4, 4, 64, 256
TAIL = 20  # steps that a final loss is the mean of


@dataclass(frozen=True)
class Variant:
    """A row of the table: codes of weights and of gradients, and the seed of stochastic rounding."""

    weights: str = ""
    gradients: str = ""
    seed: int | None = None

    @property
    def name(self) -> str:
        rounding = "" if self.seed is None else ", stochastic"
        return f"weights {self.weights or 'exact'}, gradients {self.gradients or 'exact'}{rounding}"

    def policy(self) -> ZeroPolicy:
        """The policy of this row."""
        return ZeroPolicy(
            3,
            gathers=GatherPolicy(persistence_threshold=0),
            codes=Codes(
                Quantization(self.weights) if self.weights else None,
                Quantization(self.gradients) if self.gradients else None,
                self.seed,
            ),
        )


VARIANTS = (
    Variant(),
    Variant("int8", "int8"),
    Variant("int8", "int4"),
    Variant("int8", "int4", 1),
    Variant("fp8", "fp8"),
    Variant("int4", "int4"),
)


def pages() -> Tensor:
    """The bytes of all pages."""
    folder = Path(__file__).resolve().parents[1] / "docs"
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.md")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def model() -> GPT:
    """Four layers of width 128."""
    config = ModelConfig(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        seq_length=LENGTH,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    placement = Placement.of(solo_context(), torch.float32)
    made = GPT(Slice(model_spec(config), (TOKENS, TOKENS), placement, RecomputeConfig()))
    initialize(made, 1, placement.place)
    return made


def losses(variant: Variant, text: Tensor, steps: int, context: ParallelContext) -> list[float]:
    """The mean loss per token of each step, over all ranks."""
    gpt, policy = model(), variant.policy()
    units = [Unit(0, part, tuple(part.parameters())) for part in (gpt.embedding, *gpt.layers, gpt.head)]
    store = build_store(units, policy, context)
    parallel = DataParallel(units, store, policy, context)
    optimizer = Optimizer(store, Adam(eps=1e-8), context, 1.0)
    found, share = [], 1 / (RANKS * SAMPLES * LENGTH)
    for step in range(steps):
        places = torch.Generator().manual_seed(RANKS * step + context.rank)
        starts = torch.randint(0, len(text) - LENGTH - 1, (SAMPLES,), generator=places)
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])
        parallel.start(step)
        loss = gpt.run(Batch(rows[:, :-1], Targets(rows[:, 1:].contiguous())))[1]["lm"]
        parallel.begin_backward(0, reduce=True)
        loss.backward()
        parallel.end_backward()
        parallel.finish()
        optimizer.step(1e-3, 0.0, share)
        total = loss.detach().clone().reshape(1)
        context.replica.all_reduce(total).wait()
        found.append(float(total) * share)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    steps, text = parser.parse_args().steps, pages()
    torch.set_num_threads(1)
    exact: list[float] = []
    for variant in VARIANTS:
        world, grid = ThreadWorld(RANKS), ProcessGrid(dp=RANKS)
        found = world.run(
            lambda rank, v=variant, w=world, g=grid: losses(
                v, text, steps, thread_context(w, g, rank, node_size=2)
            )
        )[0]
        exact = exact or found
        last, theirs = (sum(each[-TAIL:]) / len(each[-TAIL:]) for each in (found, exact))
        furthest = max(abs(a - b) for a, b in zip(found, exact, strict=True))
        print(
            f"{variant.name:<52} first {found[0]:.4f} last {last:.4f} ({last - theirs:+.4f}), "
            f"furthest {furthest:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
