"""`Job`: a model loaded on all ranks of a job, ready to answer."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from megazero.checkpoint.folder import saved_iterations
from megazero.checkpoint.locate import one_checkpoint
from megazero.checkpoint.manifest import MANIFEST
from megazero.errors import ConfigError
from megazero.harness.answers import Answers, follow
from megazero.harness.arguments import HarnessArguments
from megazero.harness.scoring import TOKENS, Scorer
from megazero.harness.text import HarnessTokenizer
from megazero.inference.invariant import hindrance, make_invariant
from megazero.inference.job import import_options
from megazero.inference.staged import StagedModel
from megazero.models.batch import Batch, MicroBatch
from megazero.models.chunk import ModelChunk
from megazero.models.language_model import LanguageModel
from megazero.mpu.context import ParallelContext
from megazero.mpu.launch import Launch, leave, reporting
from megazero.train.resume.trained import AxisSizes, load_for_inference


@dataclass(frozen=True)
class Job:
    """The answers of a job's model, and this rank's place in the job."""

    answers: Answers
    context: ParallelContext

    @classmethod
    def of(cls, wanted: HarnessArguments) -> Job:
        """Join the job and load the model; every rank calls this.

        Raises:
            MegazeroError: the model cannot be loaded, is none that continues texts, or sizes do not fit.
        """
        launch = Launch.from_environment()
        if wanted.devices not in (None, launch.world_size):
            raise ConfigError(
                f"`devices` must be the number of ranks that were started, {launch.world_size}, but is "
                f"{wanted.devices}; start them by `megazero launch` or torchrun, or leave it out"
            )
        sizes = AxisSizes(
            wanted.tensor_model_parallel_size,
            wanted.pipeline_model_parallel_size,
            wanted.context_parallel_size,
            wanted.expert_model_parallel_size,
            replicas=True,
        )
        options = import_options(argparse.Namespace(**vars(wanted)))
        loaded = load_for_inference(wanted.load, launch, sizes, options=options, step=wanted.ckpt_step)
        with reporting(loaded.context):
            for remark in loaded.remarks if launch.rank == 0 else ():
                print(f"warning: {remark}", file=sys.stderr)
            chunks = {number: _speaks(chunk) for number, chunk in loaded.chunks.items()}
            coded, pp = wanted.kv_cache_dtype == "int8", loaded.context.pp
            model: StagedModel[Batch] = StagedModel(chunks, loaded.stage_of, pp, coded_cache=coded)
            if not hindrance(model):  # its products are faster, too
                make_invariant(model)
            length, count = wanted.seq_length or model.spec.positions, wanted.micro_batch_size
            tokens = TOKENS if count is None else count * length
            scorer = Scorer(model, loaded.context, max_length=length, tokens=tokens)
            tokenizer = HarnessTokenizer(loaded.tokenizer, wanted.add_bos_token)
            return cls(Answers(scorer, tokenizer), loaded.context)

    @property
    def leads(self) -> bool:
        """Whether this is the first rank, which asks."""
        return self.context.rank == 0

    def followed(self) -> str:
        """Answer with the first rank until it closes, and leave; return its problem, "" for none."""
        with reporting(self.context):
            problem = follow(self.answers)
        self.leave()
        return problem

    def leave(self) -> None:
        """Leave the job."""
        leave(self.context)


def _speaks(chunk: ModelChunk[MicroBatch]) -> LanguageModel:
    if not isinstance(chunk, LanguageModel):
        raise ConfigError(
            "`load` must hold a model that continues texts, but holds an encoder and a decoder; score it by "
            "fine-tuning"
        )
    return chunk


def fingerprint(wanted: HarnessArguments) -> str:
    """A name for all that a model's answers depend on, without loading it: two models have different ones."""
    folder = Path(wanted.load)
    if folder.is_dir() and saved_iterations(folder) and any(folder.glob(f"iter_*/{MANIFEST}")):
        files = [one_checkpoint(folder, wanted.ckpt_step) / MANIFEST]
        content = files[0].read_bytes()
    else:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        facts = [(str(f.relative_to(folder)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        content = json.dumps(facts).encode()
    settings = {key: value for key, value in vars(wanted).items() if not key.endswith("_parallel_size")}
    return hashlib.blake2b(content + repr(settings).encode(), digest_size=8).hexdigest()
