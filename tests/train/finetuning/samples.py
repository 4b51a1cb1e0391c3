"""Small labelled files, and runs of fine-tuning on them in this process."""

from __future__ import annotations

import json
import random
from pathlib import Path

from megazero.config.resolve import parse_config
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.launch import grid_of
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.finetuning.run import finetune_on

WORDS = ("red", "blue", "green", "cat", "dog", "bird", "run", "walk", "fly", "stone", "river", "tree")
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 2e-3 --lr-warmup-fraction 0.1 --init-method-std 0.1 "
    "--adam-eps 1e-4 --log-interval 1000 --num-workers 0"
)
FAMILIES = {
    "bert": "--model-family bert --tokenizer-type BertWordPieceLowerCase --vocab-file {folder}/vocab.txt",
    "gpt": "--model-family gpt --tokenizer-type ByteLevelTokenizer",
}
TASKS = {
    "train only": "--train-data {folder}/train.tsv",
    "pairs": "--task classification --text-columns a b --train-data {folder}/train.tsv --valid-data "
    "{folder}/valid.tsv {folder}/more.tsv --test-data {folder}/test.tsv --id-column name",
    "choices": "--task multiple-choice --text-columns a --choice-columns x y z --label-column right "
    "--train-data {folder}/train.tsv --valid-data {folder}/valid.tsv --test-data {folder}/test.tsv",
}


def make_files(folder: Path) -> Path:
    """A vocabulary, and TSV files with columns for both tasks; the test file knows no labels."""
    rng = random.Random(0)

    def words(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *WORDS]) + "\n")
    for split, count in (("train", 19), ("valid", 11), ("more", 5), ("test", 9)):
        known = split != "test"
        lines = ["name\ta\tb\tx\ty\tz" + "\tlabel\tright" * known]
        for i in range(count):
            first, second = words(6), words(6)
            label = "low" if len(first) < 12 else "high" if "red" in second else "mid"
            row = [f"{split}{i}", first, second, words(2), words(2), words(2)]
            lines.append("\t".join([*row, label, rng.choice("xyz")] if known else row))
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def run(folder: Path, family: str, task: str, *flags: object, ranks: int = 1) -> list[dict]:
    """Fine-tune on this many ranks as threads; the records of all evaluations so far."""
    metrics = [] if "--metrics-jsonl" in flags else ["--metrics-jsonl", folder / "m.jsonl"]
    words = f"{MODEL} {FAMILIES[family]} {TASKS[task]}".format(folder=folder).split()
    config = parse_config([*words, *map(str, [*flags, *metrics])], world_size=ranks).config
    if ranks == 1:
        finetune_on(config, solo_context())
    else:
        world, grid = ThreadWorld(ranks), grid_of(config.parallel, ranks)
        world.run(lambda rank: finetune_on(config, thread_context(world, grid, rank)))
    path = Path(config.logging.metrics_jsonl)
    lines = path.with_name(path.stem + ".eval.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def steps(folder: Path, name: str = "m.jsonl") -> list[tuple]:
    """What each iteration did."""
    keys = ("iteration", "consumed_samples", "task_loss", "accuracy", "grad_norm", "learning_rate")
    lines = map(json.loads, (folder / name).read_text().splitlines())
    return [tuple(line[key] for key in keys) for line in lines]
