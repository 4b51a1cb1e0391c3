"""Asks each stage of the recipe the same questions, and draws the curves of its training.

python examples_3d/post_training/compare.py --data DATA --tokenizer FOLDER --output OUT NAME=RUN ...
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megazero.inference.sampling import Sampling
from megazero.inference.staged import StagedModel
from megazero.models.language_model import LanguageModel
from megazero.mpu.launch import Launch
from megazero.pictures.style import LIGHT, count_axis, new_figure, save, styled
from megazero.serving.chat import ChatTemplate
from megazero.serving.engine import complete
from megazero.serving.wanted import Wanted
from megazero.train.resume.trained import AxisSizes, load_for_inference

MOST_TOKENS = 16
CURVES = (
    ("lm_loss", "loss of chats"),
    ("rewards_margins", "margin of rewards (nats)"),
    ("reward", "mean reward"),
)
Row = dict[str, Any]


def answers(run: str, rows: Sequence[Row], chats: ChatTemplate) -> list[str]:
    """The likeliest answers of a run's newest checkpoint."""
    loaded = load_for_inference(run, Launch(), AxisSizes(), verb="generate")
    chunks = {number: LanguageModel.of(chunk) for number, chunk in loaded.chunks.items()}
    end, greedy = frozenset({loaded.tokenizer.eod}), Sampling(greedy=True)
    wanted = [
        Wanted(tuple(chats.ids(row["prompt"], variables={})), MOST_TOKENS, greedy, stop_ids=end)
        for row in rows
    ]
    done = complete(StagedModel(chunks, loaded.stage_of, loaded.context.pp), wanted)
    texts = ([token.id for token in one.tokens if token.id not in end] for one in done)
    return [loaded.tokenizer.decode(ids) for ids in texts]


def shares(rows: Sequence[Row], texts: Sequence[str]) -> str:
    """Shares of answers that are the right one alone, and of those that hold it."""
    answered = [(row["answer"], text.strip()) for row, text in zip(rows, texts, strict=True)]
    alone = sum(text == wanted for wanted, text in answered) / len(rows)
    held = sum(wanted in re.split(r"[\s.,]+", text) for wanted, text in answered) / len(rows)
    return f"{alone:6.1%} {held:10.1%}"


def curve(run: Path, key: str) -> list[tuple[int, float]]:
    """The values of a metric at each step of a run that has it."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["iteration"], line[key]) for line in lines if line.get(key) is not None]


def draw(runs: dict[str, Path], output: Path) -> None:
    """One panel for each stage."""
    with styled(LIGHT):
        figure = new_figure("From a language model to one that answers", height=3.6)
        panels = figure.subplots(1, len(CURVES))
        for axes, (name, run), (key, label) in zip(panels, runs.items(), CURVES, strict=True):
            axes.plot(*zip(*curve(run, key), strict=True), color=LIGHT.series[0], linewidth=1.2)
            axes.set(title=name, xlabel="step", ylabel=label)
            count_axis(axes)
        save(figure, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of make_data.py")
    parser.add_argument("--tokenizer", required=True, help="folder of the tokenizer with its chat template")
    parser.add_argument("--output", type=Path, required=True, help="folder of the picture")
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN")
    flags = parser.parse_args()
    runs = {name: Path(run) for name, _, run in (word.partition("=") for word in flags.runs)}
    chats, files = ChatTemplate(flags.tokenizer), ("prompts", "prompts_held_out")
    texts = {name: (flags.data / f"{name}.jsonl").read_text(encoding="utf-8") for name in files}
    rows = {name: [json.loads(line) for line in text.splitlines()] for name, text in texts.items()}
    said = {
        name: {file: answers(str(run), rows[file], chats) for file in files} for name, run in runs.items()
    }
    for file in files:
        print(f"{file} ({len(rows[file])}): the right answer alone, or among other words")
        for name in runs:
            print(f"  {name:18} {shares(rows[file], said[name][file])}")
    for number in range(0, len(rows["prompts"]), len(rows["prompts"]) // 6):
        print(rows["prompts"][number]["prompt"][-1]["content"])
        for name in runs:
            print(f"  {name:18} {said[name]['prompts'][number].strip()}")
    draw(runs, flags.output / "curves.png")
    print(f"wrote {flags.output / 'curves.png'}")


if __name__ == "__main__":
    main()
