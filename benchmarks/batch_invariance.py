"""The cost of batch invariance on the CPU: of products alone, and of a model's steps.

    OMP_NUM_THREADS=1 python benchmarks/batch_invariance.py products
    OMP_NUM_THREADS=1 python benchmarks/batch_invariance.py steps

`products`: x weight^T by torch (F.linear), by the ordered product of csrc/linear, and by F.linear on tiles of
8, 16 and 32 rows, the last one padded. `steps`: a Llama of 20M parameters over pages, ordinary and
batch-invariant: decoding steps of 1, 16 and 64 sequences, and a prompt. The contenders take turns in each
round; times are medians over rounds of the process's processor time, ratios are ratios of these medians to
the first contender. One JSON line for each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.config.tree.config import Config
from megazero.config.tree.data import DataConfig
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.optimizer import OptimizerConfig
from megazero.config.tree.training import BatchConfig, TrainingConfig
from megazero.inference.invariant import OrderedProduct, make_invariant
from megazero.inference.staged import StagedModel
from megazero.models.batch import Batch, Places
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.serving.page_buffers import PageBuffers, Ragged
from megazero.train.parts.chunks import build_chunks
from megazero.train.parts.vocabulary import Vocabulary

SIZES = ((512, 2048), (2048, 512), (512, 32000))
ROWS = (1, 4, 16, 64, 256, 512)
VOCABULARY = 16384
PAGE = 32


def in_turn(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, object]:
    """Median milliseconds of each, and their ratios to the first."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            begin = time.process_time()
            run()
            if number:  # the first round warms up
                times[name].append(time.process_time() - begin)
    medians = {name: statistics.median(own) * 1e3 for name, own in times.items()}
    first = next(iter(medians.values()))
    ratios = {f"{name} ratio": round(own / first, 3) for name, own in medians.items()}
    return {**{f"{name} ms": round(own, 3) for name, own in medians.items()}, **ratios}


def tiled(x: Tensor, weight: Tensor, rows: int) -> Tensor:
    """The product on tiles of so many rows."""
    padded = F.pad(x, (0, 0, 0, -len(x) % rows))
    return torch.cat([F.linear(tile, weight) for tile in padded.split(rows)])[: len(x)]


def products(rounds: int) -> None:
    """Print a line for each size and number of rows."""
    for depth, width in SIZES:
        weight, product = torch.randn(width, depth), OrderedProduct()
        for rows in ROWS:
            x = torch.randn(rows, depth)
            contenders: dict[str, Callable[[], object]] = {
                "torch": lambda x=x, weight=weight: F.linear(x, weight),
                "ordered": lambda x=x, weight=weight, product=product: product(x, weight, None),
            }
            for tile in (8, 16, 32):
                contenders[f"tiles of {tile}"] = lambda x=x, w=weight, tile=tile: tiled(x, w, tile)
            with torch.inference_mode():
                line = in_turn(contenders, rounds)
            print(json.dumps({"depth": depth, "width": width, "rows": rows, **line}), flush=True)


def model_of() -> StagedModel[Batch]:
    """The Llama, with random weights."""
    sizes = {"num_layers": 8, "hidden_size": 384, "ffn_hidden_size": 1024, "seq_length": 1024}
    heads = {"num_attention_heads": 6, "num_query_groups": 2, "vocab_size": VOCABULARY}
    kind = {
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "position_embedding_type": "rope",
        "add_bias_linear": False,
    }
    config = Config(
        model=ModelConfig(**sizes, **heads, **kind),
        data=DataConfig(mock_data=True),
        batch=BatchConfig(micro_batch_size=1, global_batch_size=1),
        optimizer=OptimizerConfig(lr=1e-3),
        training=TrainingConfig(train_iters=1),
    )
    context = thread_context(ThreadWorld(1), ProcessGrid(), 0)
    vocabulary = Vocabulary(VOCABULARY, VOCABULARY, None, None)
    (chunk,) = build_chunks(config, vocabulary, context, torch.device("cpu")).values()
    return StagedModel.whole(chunk)


def step_of(model: StagedModel[Batch], counts: tuple[int, ...], past: int) -> Callable[[], Tensor]:
    """A step over pages whose sequences have `past` positions each."""
    each = -(-(past + max(counts)) // PAGE)
    tables = tuple(tuple(range(i * each, (i + 1) * each)) for i in range(len(counts)))
    buffers = PageBuffers(each * len(counts), PAGE)
    places = [place for count in counts for place in range(past, past + count)]
    batch = Batch(torch.randint(VOCABULARY, (1, len(places))), places=Places(torch.tensor(places)))
    core = buffers.core(Ragged(counts, (past,) * len(counts), tables), model.placement.tp)
    last = torch.tensor(counts).cumsum(0) - 1

    def step() -> Tensor:
        with torch.inference_mode():
            return model.run(
                batch,
                lambda head, hidden: model.unsliced(head(hidden[last]))[:, 0],
                (len(counts), model.vocab_size),
                lambda _: core,
            )

    return step


def steps(rounds: int) -> None:
    """Print a line for each step."""
    ordinary, invariant = model_of(), model_of()
    make_invariant(invariant)
    models = {"ordinary": ordinary, "invariant": invariant}
    cases = {"decode 1": ((1,), 256), "decode 16": ((1,) * 16, 256), "decode 64": ((1,) * 64, 256)}
    cases["prompt of 512"] = (512,), 0
    for name, (counts, past) in cases.items():
        line = in_turn({kind: step_of(model, counts, past) for kind, model in models.items()}, rounds)
        print(json.dumps({"step": name, **line}), flush=True)


def main() -> None:
    """Parse arguments and run a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=("products", "steps"))
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    {"products": products, "steps": steps}[args.part](args.rounds)


if __name__ == "__main__":
    main()
