"""Memory of Korthikanti et al. (2022) beside the plans of their trainings.

    python benchmarks/published_memory.py

They train with tensor slices on 8 GPUs and sequence parallelism, and recompute attention selectively. Their
activations are those of layers, 34 s b h / T bytes for each layer and micro-batch, of which two are masks of
dropout. megazero draws these again in backward. What a plan counts for a layer is the difference between
stages of two layers and of one.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.config.resolve import parse_config
from megazero.config.steps import Progress
from megazero.pipeline.actions import Op
from megazero.plan.job import PlannedJob
from megazero.plan.plan import Plan

GIB = 2**30
TENSOR, SEQUENCE, VOCABULARY = 8, 2048, 51200
_OF_LAYER, _MASKS = 34, 2  # bytes by s b h / T, and those of them that are masks


@dataclass(frozen=True)
class Model:
    """A row of the paper: sizes, stages, chunks on each, samples of a micro-batch and a batch; GiB."""

    name: str
    layers: int
    hidden: int
    heads: int
    stages: int
    virtual: int
    micro_batch: int
    batch: int
    activations: float
    state: float

    def flags(self, layers: int, stages: int, virtual: int) -> list[str]:
        """The flags of a training of so many of its layers."""
        sizes = {
            "num-layers": layers,
            "hidden-size": self.hidden,
            "num-attention-heads": self.heads,
            "seq-length": SEQUENCE,
            "vocab-size": VOCABULARY,
            "tensor-model-parallel-size": TENSOR,
            "pipeline-model-parallel-size": stages,
            "micro-batch-size": self.micro_batch,
            "global-batch-size": self.batch,
            "lr": 1e-4,
            "train-iters": 10,
            "recompute-granularity": "selective",
        }
        flags = [str(word) for name, value in sizes.items() for word in (f"--{name}", value)]
        if virtual > 1:
            flags += ["--num-layers-per-virtual-pipeline-stage", str(layers // stages // virtual)]
        return [*flags, "--sequence-parallel", "--fp16", "--mock-data"]

    def plan(self, layers: int, stages: int, virtual: int) -> Plan:
        """The plan of a training of so many of its layers."""
        ranks = TENSOR * stages
        config = parse_config(self.flags(layers, stages, virtual), world_size=ranks).config
        return Plan.of(PlannedJob(config, ranks, True, Progress()))

    def of_layer(self) -> float:
        """The bytes that a layer keeps of a micro-batch, by plan."""
        kept = [
            self.plan(layers, 1, 1).stages[0].trace.like((Op.FORWARD, 0, 1, 0), 2).left for layers in (1, 2)
        ]
        return kept[1] - kept[0]


MODELS = (
    Model("22B", 48, 6144, 64, 1, 1, 4, 4, 9.6, 45.6),
    Model("175B", 96, 12288, 96, 8, 3, 1, 64, 12.4, 45.6),
    Model("530B", 105, 20480, 128, 35, 3, 1, 280, 23.1, 31.6),
    Model("1T", 128, 25600, 160, 64, 1, 1, 512, 26.6, 33.0),
)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(
        f"{'':<6}{'activations':>12}{'planned':>9}{'':>7}{'state':>8}{'planned':>9}{'':>7}"
        f"{'layer, no masks':>17}{'planned':>11}"
    )
    for model in MODELS:
        plan = model.plan(model.layers, model.stages, model.virtual)
        activations = plan.stages[0].memory["device"]["activations"] / GIB
        state = mean(stage.resting for stage in plan.stages) / GIB
        unit = SEQUENCE * model.micro_batch * model.hidden / TENSOR / 2**20
        without, layer = (_OF_LAYER - _MASKS) * unit, model.of_layer() / 2**20
        print(
            f"{model.name:<6}{model.activations:>12.1f}{activations:>9.1f}"
            f"{activations / model.activations - 1:>+7.1%}"
            f"{model.state:>8.1f}{state:>9.1f}{state / model.state - 1:>+7.1%}"
            f"{without:>13.1f} MiB{layer:>7.1f} MiB{layer / without - 1:>+7.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
