"""The command `megazero quantize`. Under torchrun, ranks share the samples."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megazero.commands.outputs import output_folder
from megazero.config.tree.parallel import ParallelConfig
from megazero.errors import exit_status
from megazero.formats.hf.writer import DTYPES
from megazero.mpu.launch import Launch, join, leave, reporting
from megazero.quantize.blocks import BlockModel
from megazero.quantize.gptq import Gptq
from megazero.quantize.job import quantize
from megazero.quantize.recipe import METHODS, SCHEMES, Recipe


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the flags."""
    parser = argparse.ArgumentParser(
        prog="megazero quantize",
        description="Write a model with weights in integers of 8 or 4 bits, as a folder that transformers "
        "and vLLM load. Embeddings, head, norms, routers and biases stay as they are.",
    )
    parser.add_argument("load", help="a run's folder, a checkpoint, or a folder of transformers")
    parser.add_argument(
        "--out", type=output_folder, required=True, help="folder to write; must be new or empty"
    )
    parser.add_argument(
        "--scheme",
        choices=SCHEMES,
        default="W4",
        help="W8 and W4: weights of 8 or 4 bits; W8A8: inputs of products in 8 bits too (default W4)",
    )
    parser.add_argument(
        "--method", choices=METHODS, default="gptq", help="how codes are chosen (default gptq)"
    )
    parser.add_argument("--calibrate", metavar="PREFIX", help="dataset whose samples calibrate and measure")
    parser.add_argument(
        "--calibrate-samples", type=int, default=128, help="samples that calibrate (default 128)"
    )
    parser.add_argument(
        "--held-out-samples", type=int, default=64, help="samples of the perplexity (default 64)"
    )
    parser.add_argument(
        "--split", help="training, validation and test part of the dataset (default: as trained)"
    )
    parser.add_argument(
        "--seq-length", type=int, help="tokens of a sample (default: as trained, at most 2048)"
    )
    parser.add_argument(
        "--group-size",
        type=int,
        help="inputs that share a scale; 0: all of a row (default: 128 for W4, else 0)",
    )
    parser.add_argument(
        "--ignore",
        nargs="+",
        default=[],
        metavar="NAME",
        help="modules of transformers that stay as they are, such as down_proj, or re:REGEX; all parts of a "
        "weight that is one here, such as queries, keys and values, stay with one of them",
    )
    parser.add_argument("--damping", type=float, default=0.01, help="of GPTQ's products (default 0.01)")
    parser.add_argument(
        "--act-order", action="store_true", help="GPTQ: columns with the largest inputs first"
    )
    parser.add_argument(
        "--smoothing-strength", type=float, default=0.5, help="the part that SmoothQuant moves (default 0.5)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of scales and other weights (default: as trained)")
    parser.add_argument(
        "--architecture", metavar="CLASS", help="the class in transformers (default: that fits)"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags; returns the exit status."""
    flags = build_parser().parse_args(argv)
    return exit_status(lambda: _run(flags))


def _run(flags: argparse.Namespace) -> None:
    context = join(ParallelConfig(), Launch.from_environment())
    with reporting(context), BlockModel.opened(flags.load, context.device, flags.seq_length) as model:
        recipe = Recipe.of(
            flags.scheme,
            flags.method,
            flags.group_size,
            DTYPES[flags.dtype or model.dtype],
            gptq=Gptq(flags.damping, flags.act_order),
            strength=flags.smoothing_strength,
            ignore=flags.ignore,
        )
        sizes = flags.calibrate_samples, flags.held_out_samples
        samples = model.samples(flags.calibrate, flags.split, sizes) if flags.calibrate else (None, None)
        report = quantize(model, recipe, samples, flags.out, context, architecture=flags.architecture)
        if report is not None:
            print(report.as_text() + f"written to {flags.out}")
    leave(context)
