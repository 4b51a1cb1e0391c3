"""Tokens a second of models whose linear layers have integer codes, beside fp32.

    OMP_NUM_THREADS=1 python benchmarks/quantized_generation.py generation
    OMP_NUM_THREADS=1 python benchmarks/quantized_generation.py generation --layers 4 --hidden 1024
    OMP_NUM_THREADS=1 python benchmarks/quantized_generation.py products
    OMP_NUM_THREADS=1 python benchmarks/quantized_generation.py profile

`generation`: `megazero.inference.generate` continues a prompt of 16 tokens by --tokens, in --rows
sequences, by a model with random weights: fp32, int8 (a scale for each row), int4 (groups of 128), and int8
with inputs rounded too, which are its weights' codes. `products`: x weight^T alone by torch in fp32, by
csrc/coded_linear, and by torch's packed products, which take bf16, over so many weights that they leave the
caches. `profile`: the share of linear layers in a step. Contenders take turns in each round; figures are
medians over rounds of the process's processor time, ratios are to fp32. One JSON line for each.
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
from megazero.inference.generate import generate
from megazero.inference.sampling import Sampling
from megazero.inference.staged import StagedModel
from megazero.layers.coded import CodedProduct, give_codes, takes_codes
from megazero.models.batch import Batch
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops.coded_linear import CodedWeight, coded_linear
from megazero.quantize.grid import Grid
from megazero.train.parts.chunks import build_chunks
from megazero.train.parts.vocabulary import Vocabulary

SCHEMES = {"int8": (8, None, False), "int4": (4, 128, False), "int8, inputs too": (8, None, True)}
SIZES = ((512, 512), (512, 2048), (2048, 512), (1024, 1024), (1024, 4096))
BYTES = 1 << 26
"""Of the fp32 weights that a product goes through."""


def in_turn(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of processor time of each."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            begin = time.process_time()
            run()
            if number:  # the first round warms up
                times[name].append(time.process_time() - begin)
    return {name: statistics.median(own) for name, own in times.items()}


def coded(weight: Tensor, scheme: str) -> CodedWeight:
    """The rounded weight [n, h]."""
    bits, group, rounds_inputs = SCHEMES[scheme]
    grid = Grid(bits, group)
    quantized = grid.quantized(weight, grid.scales(weight))
    return CodedWeight.of(quantized.codes, quantized.scales, bits, rounds_inputs)


def model_of(args: argparse.Namespace, scheme: str | None) -> StagedModel[Batch]:
    """A Llama with random weights, or with their codes."""
    wide, heads = args.hidden, args.hidden // 64
    sizes = {"num_layers": args.layers, "hidden_size": wide, "ffn_hidden_size": 128 * round(wide / 48)}
    sizes |= {"num_attention_heads": heads, "num_query_groups": heads // 2, "seq_length": 1024}
    kind = {"normalization": "RMSNorm", "activation": "swiglu", "position_embedding_type": "rope"}
    config = Config(
        model=ModelConfig(**sizes, **kind, add_bias_linear=False, vocab_size=args.vocabulary),
        data=DataConfig(mock_data=True),
        batch=BatchConfig(micro_batch_size=1, global_batch_size=1),
        optimizer=OptimizerConfig(lr=1e-3),
        training=TrainingConfig(train_iters=1),
    )
    context = thread_context(ThreadWorld(1), ProcessGrid(), 0)
    vocabulary = Vocabulary(args.vocabulary, args.vocabulary, None, None)
    (chunk,) = build_chunks(config, vocabulary, context, torch.device("cpu")).values()
    generator = torch.Generator().manual_seed(1)
    for parameter in chunk.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.02, generator=generator)
        else:
            parameter.data.fill_(1.0)
    for layer in chunk.modules():
        if scheme is not None and takes_codes(layer):
            give_codes(layer, coded(layer.weight.detach().flatten(0, -2), scheme))
    return StagedModel.whole(chunk)


def bytes_of(model: StagedModel[Batch]) -> int:
    """Bytes of all weights."""
    (chunk,) = model.chunks.values()
    products = [getattr(module, "product", None) for module in chunk.modules()]
    codes = sum(product.weight.nbytes for product in products if isinstance(product, CodedProduct))
    return codes + sum(parameter.nbytes for parameter in chunk.parameters())


def generation(args: argparse.Namespace) -> None:
    """Print a line for each number of rows."""
    models = {name: model_of(args, None if name == "fp32" else name) for name in ("fp32", *SCHEMES)}
    count = sum(parameter.numel() for parameter in models["fp32"].any_part.parameters())
    prompt = torch.randint(args.vocabulary, (16,), generator=torch.Generator().manual_seed(2)).tolist()
    for rows in args.rows:

        def run(model: StagedModel[Batch], rows: int = rows) -> object:
            greedy = Sampling(greedy=True)
            return generate(model, [prompt] * rows, max_new_tokens=args.tokens, sampling=greedy)

        seconds = in_turn({name: lambda m=model: run(m) for name, model in models.items()}, args.rounds)
        line = {"parameters": count, "rows": rows}
        for name, own in seconds.items():
            line[f"{name} tokens/s"] = round(rows * args.tokens / own, 1)
        for name, own in seconds.items():
            line[f"{name} ratio"] = round(seconds["fp32"] / own, 2)
        line |= {f"{name} MB": round(bytes_of(model) / 1e6, 1) for name, model in models.items()}
        print(json.dumps(line), flush=True)


def products(args: argparse.Namespace) -> None:
    """Print a line for each size and number of rows."""
    for depth, width in SIZES:
        floats = [torch.randn(width, depth) for _ in range(max(1, BYTES // (4 * depth * width)))]
        weights = {name: [coded(weight, name) for weight in floats] for name in SCHEMES}
        for rows in args.rows:
            runs = runs_of(torch.randn(rows, depth), floats, weights)
            with torch.inference_mode():
                seconds = in_turn(runs, args.rounds)
            line: dict[str, object] = {"depth": depth, "width": width, "rows": rows}
            line |= {f"{name} us": round(own / len(floats) * 1e6, 1) for name, own in seconds.items()}
            line |= {f"{name} ratio": round(seconds["fp32"] / own, 2) for name, own in seconds.items()}
            print(json.dumps(line), flush=True)


def runs_of(
    x: Tensor, floats: list[Tensor], weights: Mapping[str, list[CodedWeight]]
) -> dict[str, Callable[[], object]]:
    """The contenders: products of x with all weights."""
    (width, depth), narrow = floats[0].shape, x.bfloat16()
    scales, pairs = torch.rand(width).bfloat16(), torch.rand(depth // 128, width, 2).bfloat16()
    bytes_ = [weight.codes for weight in weights["int8"]]
    pack = torch._convert_weight_to_int4pack_for_cpu
    packed = [pack((weight.codes + 8).int(), 1) for weight in weights["int4"]]
    runs: dict[str, Callable[[], object]] = {"fp32": lambda: [F.linear(x, weight) for weight in floats]}
    for name, own in weights.items():
        runs[name] = lambda own=own: [coded_linear(x, weight, None) for weight in own]
    runs["torch int8"] = lambda: [torch._weight_int8pack_mm(narrow, w, scales) for w in bytes_]
    runs["torch int4"] = lambda: [torch._weight_int4pack_mm_for_cpu(narrow, w, 128, pairs) for w in packed]
    return runs


def profile(args: argparse.Namespace) -> None:
    """Print the share of linear layers and of the head in the processor time of steps of one row."""
    for name in ("fp32", *SCHEMES):
        model = model_of(args, None if name == "fp32" else name)
        spent = {"linear": 0.0, "head": 0.0}
        for module in model.any_part.modules():
            product = getattr(module, "product", None)
            if product is not None:
                kind = "head" if module is model.any_part.head else "linear"
                module.product = timed(product, spent, kind)
        prompt, greedy = [1] * 16, Sampling(greedy=True)
        generate(model, [prompt], max_new_tokens=4, sampling=greedy)
        spent.update(linear=0.0, head=0.0)
        begin = time.process_time()
        generate(model, [prompt], max_new_tokens=args.tokens, sampling=greedy)
        whole = time.process_time() - begin
        shares = {f"{kind} share": round(own / whole, 3) for kind, own in spent.items()}
        print(json.dumps({"scheme": name, "ms a token": round(whole / args.tokens * 1e3, 3), **shares}))


def timed(product: Callable[..., Tensor], spent: dict[str, float], kind: str) -> Callable[..., Tensor]:
    """The product, which adds its processor time to what is spent."""

    def run(*given: object) -> Tensor:
        begin = time.process_time()
        result = product(*given)
        spent[kind] += time.process_time() - begin
        return result

    return run


def main() -> None:
    """Parse arguments and run a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=("generation", "products", "profile"))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    {"generation": generation, "products": products, "profile": profile}[args.part](args)


if __name__ == "__main__":
    main()
