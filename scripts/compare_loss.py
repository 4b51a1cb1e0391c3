"""Did a training run learn more than how frequent each token is?

`python scripts/compare_loss.py METRICS.jsonl --unigram-entropy X` prints the last validation loss beside the
corpus's unigram entropy, the loss of the best model that ignores context; exit status 1 unless the loss is
below it by `--margin` nats.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.loss_curves import read_curves


def verdict(loss: float, entropy: float, margin: float) -> bool:
    """Whether the loss is clearly below the entropy; false for a loss that is not a number."""
    return loss <= entropy - margin


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the comparison; 0 if the run passes or is not judged, 1 if not."""
    parser = argparse.ArgumentParser(prog="compare_loss.py", description=__doc__.split("\n")[0])
    parser.add_argument("metrics", metavar="METRICS.jsonl", help="what --metrics-jsonl wrote")
    parser.add_argument("--unigram-entropy", type=float, required=True, metavar="X", help="nats per token")
    parser.add_argument("--margin", type=float, default=0.5, metavar="X", help="nats (default: 0.5)")
    parser.add_argument(
        "--judge-from-step", type=int, default=0, metavar="N", help="show shorter runs without judging them"
    )
    args = parser.parse_args(argv)
    curves = read_curves(args.metrics)
    if not curves.validation:
        print(f"error: {args.metrics} must have an evaluation beside it, but has none.", file=sys.stderr)
        return 1
    step, loss = curves.validation[-1]
    print(f"unigram entropy of the corpus   {args.unigram_entropy:7.4f} nats per token")
    print(f"validation loss after step {step:<5}{loss:7.4f} nats per token")
    if step < args.judge_from_step:
        print(f"not judged: {step} steps are too few to learn from ({args.judge_from_step} are needed)")
        return 0
    passed = verdict(loss, args.unigram_entropy, args.margin)
    difference = args.unigram_entropy - loss
    print(f"{'passed' if passed else 'FAILED'}: {difference:.4f} nats below; at least {args.margin:g} needed")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
