"""Training speed against other ways to train the same BERT (24M parameters by default), interleaved.

    python benchmarks/bert_step.py --dtype fp32                  # one process, all cores' threads
    python benchmarks/bert_step.py --dtype fp32 --ranks 2        # two ranks, the threads shared out
    python benchmarks/bert_step.py --dropout 0.1
    python benchmarks/bert_step.py --short 0.5 --contenders megazero megazero-pack megazero-untrimmed

As in `train_step.py`, every contender lives in processes of its own, which train in turn. All take the same
samples: 90% within 15 tokens of the sequence length, 10% (`--short`) of all lengths, 15% of the tokens to be
restored. Speed counts positions of the full sequence length, so that only time differs; `real_share` says how
many of them are tokens.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders.bert import BertShape
from benchmarks.teams import Contender, add_arguments, present, results, started, take_turns, write

CONTENDERS = (
    Contender("plain", "bert.plain", "build", (1, 2)),
    Contender("plain-masked-rows", "bert.plain", "build", (1, 2), options={"masked_rows": True}),
    Contender("transformers", "bert.transformers_", "build", (1, 2), "transformers"),
    Contender("megatron-core", "bert.megatron", "build", (1, 2), "megatron.core"),
    Contender("megazero", "bert.ours", "build", (1, 2)),
    Contender("megazero-pack", "bert.ours", "build", (), options={"pack": True}),
    Contender("megazero-untrimmed", "bert.ours", "build", (), options={"trim": False}),
)


SHAPES = {
    "24M": BertShape(),
    "110M": BertShape(layers=12, hidden=768, heads=12, sequence=512, vocab=30528, micro_batch=32),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, [c.name for c in CONTENDERS])
    parser.add_argument("--ranks", type=int, choices=[1, 2], default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES), default="24M", help="by the number of parameters")
    parser.add_argument("--micro-batch", type=int, help="instead of the shape's")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--short", type=float, default=0.1, help="share of the samples that are short")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    own = {key: getattr(args, key) for key in ("dtype", "device", "dropout", "short")}
    if args.micro_batch is not None:
        own["micro_batch"] = args.micro_batch
    shape = replace(SHAPES[args.shape], **own)
    by_name = {c.name: c for c in CONTENDERS}
    chosen = [by_name[name] for name in args.contenders or by_name]
    if not args.contenders:
        chosen = [c for c in chosen if args.ranks in c.ranks]
    keys = ("dtype", "ranks", "threads", "device", "shape", "dropout", "short")
    settings = {key: getattr(args, key) for key in keys}
    settings["micro_batch"] = shape.micro_batch
    settings["real_share"] = shape.real_share
    with started(present(chosen), shape, args.ranks, max(1, args.threads // args.ranks)) as (teams, _):
        take_turns(teams, shape, args.rounds, args.steps)
        write(results(teams, "bert_step", settings, chosen[0].name, step_peak=True), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
