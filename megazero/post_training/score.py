"""Scores of a file's answers: log-probabilities under a language model, or rewards; on any layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.saver import together
from megazero.config.tree.config import Config
from megazero.data.build_report import ProgressLog
from megazero.data.conversations.rows import BadRow, read_object, read_row
from megazero.data.preferences.dataset import PairSamples
from megazero.data.preferences.pairs import Pairs, read_pair
from megazero.data_tools.conversations import read_each
from megazero.errors import DataError
from megazero.models.batch import Collate
from megazero.models.objective import LossChange
from megazero.mpu.context import ParallelContext
from megazero.post_training.files import encoder_of, lines_in
from megazero.post_training.losses import PreferenceLoss
from megazero.post_training.outputs import checked, outputs_of
from megazero.post_training.preference import PairCollate
from megazero.post_training.reward import with_score
from megazero.post_training.scores import PairCollate as OfRewards
from megazero.post_training.scores import RewardLoss
from megazero.post_training.task import AnswerTask, Splits
from megazero.train.assemble import Run, assemble
from megazero.train.finetuning.pretrained import take_pretrained
from megazero.train.observe.evaluation import PeriodicEvaluation
from megazero.train.parts.vocabulary import build_vocabulary
from megazero.train.step.engine import Engine
from megazero.train.step.state import TrainState


@dataclass(frozen=True)
class ScoredLine:
    """A line of the file: the rows of one conversation, or of a pair.

    Attributes:
        rows: the token ids of each row, up to the last one that counts.
        counted: which of them are answers.
        names: the key of each row's score.
    """

    rows: tuple[np.ndarray, ...]
    counted: tuple[np.ndarray, ...]
    names: tuple[str, ...]


def read_lines(config: Config) -> list[ScoredLine]:
    """Read `--valid-data`, conversations or pairs of answers; every line is kept.

    Raises:
        DataError: a line is neither, has no answer, or its answer does not end within the sequence length.
    """
    (path,), encoder, length = config.finetune.valid_data, encoder_of(config), config.model.seq_length

    def read(line: bytes) -> ScoredLine:
        if "chosen" in read_object(line):
            chosen, rejected, _ = read_pair(line)
            texts = {"chosen": chosen, "rejected": rejected}
        else:
            texts = {"score": read_row(line)}
        rows, counted = [], []
        for ids, mask in map(encoder.encode, texts.values()):
            end = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0
            if not 1 < end <= length:
                raise BadRow(f"its answer must end within {length} tokens, but ends at {end}")
            rows.append(ids[:end])
            counted.append(mask[:end])
        return ScoredLine(tuple(rows), tuple(counted), tuple(texts))

    remedy = "correct the line, or raise --seq-length"
    lines = list(read_each(lines_in([path]), read, remedy))
    if not lines:
        raise DataError(f"`data` must hold a conversation or more, but {path} has none; check the file.")
    return lines


class Scoring(AnswerTask[Any]):
    """The task of scoring lines; a sample is two rows, which need not belong together."""

    def __init__(self, lines: Sequence[ScoredLine], out: str, *, length: int, per_token: bool):
        rows = [row for line in lines for row in zip(line.rows, line.counted, strict=True)]
        rows += [(np.zeros(1, np.int64), np.zeros(1, bool))] * (len(rows) % 2)
        offsets = np.cumsum([0, *(len(ids) for ids, _ in rows)])
        begins = np.array([int(mask.argmax()) for _, mask in rows])
        margins = np.zeros(len(rows) // 2, np.float32)
        pairs = Pairs(np.concatenate([ids for ids, _ in rows]), offsets, begins, margins)
        super().__init__(Splits(None, PairSamples(pairs, length)))
        self.lines = lines
        self.out = out
        self.per_token = per_token

    def implied(self, config: Config) -> Config:
        return with_score(config) if config.finetune.task == "reward" else config

    def objective(self, config: Config) -> LossChange:
        return RewardLoss(config.reward) if config.model.num_classes else PreferenceLoss(config.preference)

    def begin(
        self, config: Config, context: ParallelContext, vocab_size: int, engine: Engine
    ) -> tuple[str, ...]:
        begin = take_pretrained if config.model.num_classes else super().begin
        return begin(config, context, vocab_size, engine)

    def collate(
        self, config: Config, vocab_size: int, context: ParallelContext, stream_seed: int | None
    ) -> Collate[Any]:
        of = OfRewards.of if config.model.num_classes else PairCollate.of
        return of(config, vocab_size, context, stream_seed)

    def evaluations(self, run: Run, disk: Disk | None) -> PeriodicEvaluation:
        return PeriodicEvaluation(lambda split, state: None, None, ())

    def conclude(self, run: Run, state: TrainState) -> None:
        """Score all lines, and write the file."""
        engine, config = run.resumed.engine, run.resumed.config
        log = ProgressLog(run.monitor.message, "scoring")
        batches = outputs_of(engine, config, self._feeds["validation"], log)
        rows, records = (row for batch in batches for pair in batch for row in pair), []
        for line in self.lines:
            record: dict[str, object] = {}
            for name, counted in zip(line.names, line.counted, strict=True):
                logs = next(rows)
                if config.model.num_classes is None:
                    logs = logs[: len(counted) - 1][counted[1:]]
                record[name] = float(checked(logs, "the scores").sum(dtype=np.float64))
                if self.per_token:
                    record[f"{name}_tokens"] = logs.tolist()
            records.append(json.dumps(record) + "\n")
        out, disk, context = Path(self.out).absolute(), Disk(), engine.context

        def write() -> None:
            disk.make_parents(out.parent)
            disk.write_text(out, "".join(records))

        together(context, write if context.rank == 0 else None, f"write {out}")
        run.monitor.message(f"wrote the scores of {len(self.lines)} lines to {out}")


def score_on(
    config: Config,
    joined: ParallelContext,
    lines: Sequence[ScoredLine],
    out: str,
    *,
    per_token: bool = False,
) -> TrainState:
    """Score lines on a rank that has joined its job, such as a thread of a test.

    Args:
        lines: those of `--valid-data`, see `read_lines`.
        out: the file of JSON lines, in the order of the data: `score`, or `chosen` and `rejected`; it appears
            whole.
        per_token: whether to add each answer token's log-probability, under `score_tokens` and so on.

    Raises:
        MegazeroError: something that the user has to fix prevents the run.
    """
    task = Scoring(lines, out, length=config.model.seq_length, per_token=per_token)
    config = task.completed(config, joined)
    return assemble(config, build_vocabulary(config), joined, task).carry_out(task)
