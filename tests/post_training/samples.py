"""Small conversations and pairs of answers, and trainings on them in this process."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from itertools import cycle, islice
from pathlib import Path

from megazero.config.resolve import parse_config
from megazero.config.tree.config import Config
from megazero.data.conversations.answers import load_for_templates
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.launch import grid_of
from megazero.mpu.thread_group import ThreadWorld
from megazero.post_training.run import post_train_on, read_task
from megazero.train.folders import read_folder
from tests.data.conversations.templates import CHATML
from tests.data.conversations.tokenizer import byte_level, write_folder

LENGTH = 48
MODEL = (
    f"--num-layers 4 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings {LENGTH} "
    "--normalization RMSNorm --activation swiglu --disable-bias-linear --position-embedding-type rope "
    "--init-method-std 0.1 --hidden-dropout 0 --attention-dropout 0"
)
STEP = (
    "--tokenizer-type HFTokenizer --tokenizer-model {folder} --num-workers 0 --log-interval 1000 --lr 2e-3 "
    f"--lr-warmup-fraction 0.1 --adam-eps 1e-4 --seq-length {LENGTH} --micro-batch-size 1 "
    "--global-batch-size 4"
)
WORDS = ("What", "is", "the", "capital", "of", "France", "?", "Paris", "Rome", "Italy", "thank", "you")
TASKS = {
    "chat": "--task chat --train-data {folder}/chats.jsonl --valid-data {folder}/more.jsonl",
    "preference": "--task preference --train-data {folder}/pairs.jsonl --valid-data {folder}/valid.jsonl",
    "only chat": "--task chat --train-data {folder}/chats.jsonl",
    "only preference": "--task preference --train-data {folder}/pairs.jsonl",
}


def turns(*texts: str) -> list[dict[str, str]]:
    """Messages of a user and an assistant in turns."""
    return [
        {"role": role, "content": text}
        for text, role in zip(texts, islice(cycle(("user", "assistant")), len(texts)), strict=True)
    ]


def make_files(folder: Path) -> Path:
    """A tokenizer with a chat template, conversations, and pairs of answers of every form."""
    load_for_templates(str(write_folder(folder, byte_level(), CHATML, eos="<|im_end|>")))  # before threads
    rng = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(islice(cycle(rng.sample(WORDS, len(WORDS))), rng.randint(least, most)))

    for name, count in (("chats", 15), ("more", 5)):
        rows = [
            turns(words(1, 5), words(1, 6), *((words(1, 2), words(1, 3)) if i % 3 == 0 else ()))
            for i in range(count)
        ]
        write(folder / f"{name}.jsonl", [{"messages": row} for row in rows])
    for name, count in (("pairs", 9), ("valid", 5)):
        rows = []
        for i in range(count):
            question, one, other = words(1, 6), words(1, 6), words(1, 6) + "."
            if i % 3 == 0:
                rows.append({"chosen": turns(question, one), "rejected": turns(question, other)})
            elif i % 3 == 1:
                answers = ([{"role": "assistant", "content": text}] for text in (one, other))
                rows.append(
                    {"prompt": turns(question), **dict(zip(("chosen", "rejected"), answers, strict=True))}
                )
            else:
                rows.append({"prompt": question + " ", "chosen": one, "rejected": other, "margin": 1.5})
        write(folder / f"{name}.jsonl", rows)
    return folder


def write(path: Path, rows: list[object]) -> Path:
    """Write lines of JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(folder: Path, task: str, *flags: object, ranks: int = 1) -> Config:
    """The configuration of a training of this task on these ranks; flags come last, and win."""
    given = [*map(str, flags)]
    model = "" if "--load-hf" in given or "--pretrained-checkpoint" in given else MODEL
    words = f"{model} {STEP} {TASKS[task]}".format(folder=folder).split()
    return parse_config([*words, *given], world_size=ranks, reader=read_folder).config


def run(folder: Path, task: str, *flags: object, ranks: int = 1) -> tuple[list[dict], list[dict]]:
    """Train on ranks as threads; the records of all steps and of all evaluations so far."""
    metrics = () if "--metrics-jsonl" in flags else ("--metrics-jsonl", folder / "m.jsonl")
    config = config_of(folder, task, *flags, *metrics, ranks=ranks)
    task = read_task(config)  # once, as templates are not for several threads
    if ranks == 1:
        post_train_on(config, solo_context(), task)
    else:
        world, grid = ThreadWorld(ranks), grid_of(config.parallel, ranks)
        world.run(lambda rank: post_train_on(config, thread_context(world, grid, rank), deepcopy(task)))
    path = Path(config.logging.metrics_jsonl)
    return tuple(
        [json.loads(line) for line in place.read_text().splitlines()] if place.exists() else []
        for place in (path, path.with_name(path.stem + ".eval.jsonl"))
    )
