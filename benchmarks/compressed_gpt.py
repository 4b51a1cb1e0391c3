"""Trainings of a small GPT with 1-bit Adam and 0/1 Adam beside Adam: losses, keys' biases and norms.

    nice -n 10 python benchmarks/compressed_gpt.py --seeds 1234 1235 1236

Each training is a run of `pretrain_gpt.py` on two ranks over Gloo; tokens are the bytes of the standard
library's sources. A quarter of the steps passes before the freeze. A row has the validation loss, how far it
is above Adam's with the same seed, the largest magnitude in the biases of keys, which have no gradient but
rounding, and the norm of all parameters. One JSON line for each training.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megazero.checkpoint.folder import iteration_folder
from megazero.checkpoint.part import WEIGHT
from megazero.checkpoint.reader import CheckpointReader
from megazero.config.resolve import parse_config
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.mpu.launch import Launch
from megazero.train.pretraining import pretrain
from proofs.kill_job import _free_port

RANKS, HIDDEN, HEADS = 2, 128, 4
MODEL = (
    f"--num-layers 2 --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length 64 --vocab-size 257 "
    "--tokenizer-type NullTokenizer --hidden-dropout 0 --attention-dropout 0"
)
TRAINING = (
    "--micro-batch-size 8 --global-batch-size 16 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine "
    "--weight-decay 0.1 --adam-beta2 0.95 --eval-iters 20 --split 96,4,0 --log-interval 100 --log-params-norm"
)
CONTENDERS = {
    "Adam": "",
    "1-bit Adam": "--optimizer onebit-adam --onebit-freeze-step {freeze}",
    "0/1 Adam": "--optimizer zero-one-adam --zero-one-var-freeze-step {freeze}",
    "0/1 Adam, exchanges at distance 4": "--optimizer zero-one-adam --zero-one-var-freeze-step {freeze} "
    "--zero-one-local-step-scaler {freeze} --zero-one-local-step-clipper 4",
    "1-bit Adam, --no-onebit-precondition": "--optimizer onebit-adam --onebit-freeze-step {freeze} "
    "--no-onebit-precondition",
    "0/1 Adam, --no-onebit-precondition": "--optimizer zero-one-adam --zero-one-var-freeze-step {freeze} "
    "--no-onebit-precondition",
}
AS_IN_THE_PAPERS = "--no-onebit-precondition"  # measured with the first seed alone


def write_text(prefix: Path) -> None:
    """Write the sources at the top of the standard library as a dataset, one byte to a token."""
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            writer.add_document([np.frombuffer(path.read_bytes(), dtype=np.uint8)])


def largest_key_bias(checkpoint: Path, steps: int) -> float:
    """The largest magnitude in the keys' biases of all layers."""
    with CheckpointReader(iteration_folder(checkpoint, steps)) as reader:
        keys = [key for key in reader.shapes if key.kind == WEIGHT and key.name.endswith("qkv.bias")]
        biases = [reader.tensor(key).view(HEADS, 3, HIDDEN // HEADS)[:, 1] for key in keys]
    return max(float(bias.abs().max()) for bias in biases)


def last_record(path: Path) -> dict[str, object]:
    """The last line of a file of metrics."""
    return json.loads(path.read_text().splitlines()[-1])


def run_rank(rank: int, argv: list[str]) -> None:
    """Train as one of the ranks, in silence."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (closed with the process)
    pretrain(parse_config(argv, world_size=RANKS).config, Launch(rank, RANKS, rank))


def train(name: str, seed: int, steps: int, text: Path, folder: Path) -> dict[str, object]:
    """Train once, and return its row."""
    checkpoint, metrics = folder / "checkpoint", folder / "metrics.jsonl"
    flags = CONTENDERS[name].format(freeze=steps // 4)
    run = (
        f"--seed {seed} --train-iters {steps} --lr-warmup-iters {steps // 10} --eval-interval {steps} "
        f"--data-path {text} --save {checkpoint} --metrics-jsonl {metrics}"
    )
    argv = f"{MODEL} {TRAINING} {flags} {run}".split()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": "1"}
    # Forked, so that torch is imported only once.
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(rank, argv)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        if process.exitcode:
            raise SystemExit(f"a rank of `{name}` ended with {process.exitcode}")
    evaluation, step = last_record(metrics.with_name("metrics.eval.jsonl")), last_record(metrics)
    return {
        "optimizer": name,
        "seed": seed,
        "steps": steps,
        "validation_loss": round(evaluation["lm_loss"], 4),
        "largest_key_bias": round(largest_key_bias(checkpoint, steps), 4),
        "params_norm": round(step["params_norm"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1235, 1236])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        write_text(text)
        for seed in args.seeds:
            exact = 0.0
            for name in CONTENDERS:
                if AS_IN_THE_PAPERS in name and seed != args.seeds[0]:
                    continue
                place = Path(folder) / f"{seed}-{list(CONTENDERS).index(name)}"
                place.mkdir()
                row = train(name, seed, args.steps, text, place)
                exact = row["validation_loss"] if name == "Adam" else exact
                row["above_adam"] = round(row["validation_loss"] - exact, 4)
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
