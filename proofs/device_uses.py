"""Rows of `device_agrees.py` for what comes after pretraining: codes, caches, servers, answers, rewards.

A side that would be on a GPU computes without the compiled kernels of the CPU, so that a dry run goes the way
that a GPU goes.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from megazero.checkpoint.folder import latest_iteration
from megazero.config.derive import padded_vocab_size
from megazero.config.preference.rewards import RewardConfig
from megazero.config.preference.settings import PreferenceConfig
from megazero.config.steps import Step
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.config import Config
from megazero.inference.invariant import hindrance
from megazero.inference.sampling import Sampling
from megazero.inference.staged import StagedModel
from megazero.models.batch import MicroBatch
from megazero.models.objective import LossChange
from megazero.mpu.context import solo_context
from megazero.mpu.launch import choose_device
from megazero.ops import native
from megazero.ops.coded_linear import CodedWeight, coded_linear_reference, coded_linear_torch
from megazero.post_training.losses import PreferenceLoss
from megazero.post_training.policy.run import policy_on
from megazero.post_training.preference import PairCollate as AnswerCollate
from megazero.post_training.scores import PairCollate, RewardLoss
from megazero.serving.engine import complete
from megazero.serving.limits import EngineLimits
from megazero.serving.wanted import Wanted
from megazero.train.build import build_model
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.process import compute_deterministically
from megazero.verify.record import Record, record_steps, vocabulary_size
from proofs.verdicts import Verdict, near, same_tensors
from tests.inference.samples import LLAMA, VOCAB, build
from tests.layouts.layout import Layout
from tests.post_training.policy import toy

if TYPE_CHECKING:
    from proofs.device_agrees import Bench

PLAIN = Layout(shape="llama", micro_batch=2)
LOGS = 1e-3
"""The bound of a log-probability, absolute; sums are added in another order."""
CODED_LOGS = 3e-2
"""Likewise where keys and values are rounded to 8 bits: a last bit turns a code."""
PRODUCT = 1e-4
"""The bound of a product, as a share of its largest number."""


def on_device(bench: Bench, *, first: bool) -> contextlib.AbstractContextManager[object]:
    """A context in which the first side has no compiled kernels on a CPU, as on a GPU."""
    alone = first and bench.device == "cpu"
    return patch.dict(vars(native._BACKEND), built=False) if alone else contextlib.nullcontext()


def place(bench: Bench, *, first: bool) -> torch.device:
    """Where a side is."""
    return choose_device(bench.device if first else "cpu", local_rank=0)


def products(bench: Bench) -> Verdict:
    """Products with weights of codes as torch computes them against the reference, of one row and of many."""
    worst = Verdict(0.0, "every product")
    wide = 16 if bench.wide else 1
    device = place(bench, first=True)
    for bits, groups, rounds in ((8, 1, False), (4, 2, False), (8, 1, True)):
        for rows in (1, 3, 33):
            generator = torch.Generator().manual_seed(rows + bits)
            width, depth, most = 37 * wide, 48 * wide, 1 << bits - 1
            codes = torch.randint(-most, most, (width, depth), generator=generator).to(torch.int8)
            scales = torch.rand(width, groups, generator=generator) * 0.02 + 0.001
            x, bias = (torch.randn(shape, generator=generator) for shape in ((rows, depth), (width,)))
            moved = [t.to(device) for t in (x, codes, scales, bias)]
            mine = coded_linear_torch(moved[0], CodedWeight.of(*moved[1:3], bits, rounds), moved[3]).cpu()
            weight = CodedWeight.of(codes, scales, bits, rounds)
            wanted = coded_linear_reference(x * (1 + bench.spoil), weight, bias).double()
            used = ((mine.double() - wanted).abs().max() / wanted.abs().max() / PRODUCT).item()
            if not used <= worst.used:
                worst = Verdict(used, f"{bits} bits, {groups} groups, rounded inputs {rounds}, {rows} rows")
    return worst


def requests(length: int) -> list[Wanted]:
    """Requests of all kinds: greedy, drawn, cut to the likeliest, told as drawn, scored."""
    rng = np.random.default_rng(1)
    cut = Sampling(0.8, top_k=20, top_p=0.9, seed=5, min_p=0.01)
    kinds: tuple[dict[str, Any], ...] = (
        {"sampling": Sampling(greedy=True), "logprobs": 3},
        {"sampling": Sampling(seed=5), "logprobs": 0},
        {"sampling": cut, "as_drawn": True},
        {"prompt_logprobs": 2, "logprobs": 0},
    )
    made = []
    for number in range(8):
        prompt = tuple(rng.integers(0, VOCAB[0], int(rng.integers(3, length // 2))).tolist())
        made.append(Wanted(prompt, length // 3, number=number, **kinds[number % len(kinds)]))
    return made


def served(bench: Bench, bound: float, *, coded: bool = False, drawn: bool = True) -> Verdict:
    """An engine's log-probabilities, and the tokens if `drawn`, on the device against the CPU."""
    length = 96
    sizes = {"seq_length": length, "init_method_std": 0.4}
    if bench.wide:
        sizes |= {"hidden_size": 256, "ffn_hidden_size": 512, "init_method_std": 0.12}
    wanted, told = requests(length), []
    if not drawn:
        wanted = [Wanted(one.prompt * 2, 0, prompt_logprobs=0) for one in wanted]
    for first in (True, False):
        with on_device(bench, first=first):
            chunk = build(LLAMA.model_copy(update=sizes), solo_context(place(bench, first=first)))
            for weight in () if first else chunk.parameters():
                weight.data.mul_(1 + bench.spoil)
            model = StagedModel.whole(chunk)
            model.coded_cache = coded
            if first and bench.device == "cuda" and not hindrance(model):
                return Verdict(float("inf"), "batch invariance, which must be refused")
            told.append(complete(model, wanted, EngineLimits(length, 64, 16, 64, 8)))
    worst = Verdict(0.0, "every log-probability")
    for number, (mine, other) in enumerate(zip(*told, strict=True)):
        pairs = list(zip(mine.tokens, other.tokens, strict=True))
        if any(one.id != two.id for one, two in pairs):
            return Verdict(float("inf"), f"a token of request {number}")
        if mine.prompt_scores and other.prompt_scores:
            pairs += list(zip(mine.prompt_scores.tokens, other.prompt_scores.tokens, strict=True))[1:]
        gaps = [abs(one.logprob - two.logprob) for one, two in pairs if one.logprob is not None]
        used = float(np.max(gaps)) / bound
        if not used <= worst.used:
            worst = Verdict(used, f"request {number}")
    return worst


def trained_on_answers(
    bench: Bench, folder: Path, spoil: float, *, device: str, first: bool
) -> dict[str, Tensor]:
    """The tensors of a model that was trained by policy gradients on its own answers, cut and uncut."""
    lr, tensors = 1e-2 * (1 + spoil), {}
    cut = {"rollout_temperature": 0.9, "rollout_top_k": 12, "rollout_top_p": 0.95}
    for name, policy in (("whole", {}), ("cut", cut)):
        own = folder / name
        own.mkdir(parents=True)
        sections = {
            "policy": {"batch_invariant": False, "check_rollout": "error", **policy},
            "parallel": {"device": device},
            "optimizer": {"lr": lr, "adam_eps": 1e-3},
            "checkpoint": {"save": str(own / "run"), "save_interval": 3},
        }
        config = toy.config_of(PLAIN, own, 3, sections)
        with on_device(bench, first=first), contextlib.redirect_stdout(io.StringIO()):
            policy_on(config, solo_context(choose_device(device, local_rank=0)))
        saved = own / "run" / f"iter_{latest_iteration(own / 'run'):07d}"
        for path in sorted(saved.glob("*.safetensors")):
            tensors |= {f"{name}/{path.stem}/{key}": x for key, x in load_file(path).items()}
    return tensors


def answers(bench: Bench, *, twice: bool) -> Verdict:
    """Policy gradients on the device against the CPU; with `twice`, the same bits in deterministic mode."""
    if twice:
        compute_deterministically()
    with tempfile.TemporaryDirectory() as folder:
        train = partial(trained_on_answers, bench)
        first = train(Path(folder, "a"), 0.0, device=bench.device, first=True)
        device = bench.device if twice else "cpu"
        second = train(Path(folder, "b"), bench.spoil, device=device, first=twice)
    if twice:
        return same_tensors(first, second)
    weights = [
        {name: x.float() for name, x in side.items() if x.is_floating_point()} for side in (first, second)
    ]
    return near(*(Record([{}], [1.0], [{}], [tensors]) for tensors in weights))


def pairs(rng: np.random.Generator, count: int, length: int, vocabulary: int) -> dict[str, np.ndarray]:
    """Random pairs of answers with a common beginning, and what a reference made of them."""
    lengths = rng.integers(6, length + 1, (count, 2))
    starts = rng.integers(1, 5, count)[:, None].repeat(2, 1)
    tokens = rng.integers(0, vocabulary, (count, 2, length))
    tokens[:, 1] = np.where(np.arange(length) < starts[:, :1], tokens[:, 0], tokens[:, 1])
    return {
        "tokens": np.where(np.arange(length) < lengths[..., None], tokens, 0),
        "lengths": lengths,
        "answers": starts,
        "margins": np.zeros(count, np.float32),
        "reference": -rng.uniform(1, 20, (count, 2)).astype(np.float32),
    }


Changed = Callable[[Config], tuple[Config, LossChange, Any]]
"""The configuration of a run with another loss, that loss, and the class of its collate function."""


def preferred(settings: Mapping[str, Any], config: Config) -> tuple[Config, LossChange, Any]:
    """Pairs by their log-probabilities."""
    section = PreferenceConfig(**settings)
    return config.model_copy(update={"preference": section}), PreferenceLoss(section), AnswerCollate


def rewarded(settings: Mapping[str, Any], config: Config) -> tuple[Config, LossChange, Any]:
    """Pairs by the scores of a head."""
    section = RewardConfig(**settings)
    model = config.model.model_copy(update={"num_classes": 1})
    changed = config.model_copy(update={"model": model, "reward": section})
    return changed, RewardLoss(section), PairCollate


def on_pairs(bench: Bench, change: Changed) -> Verdict:
    """A training on pairs of answers, on the device against the CPU."""
    from proofs.device_agrees import Side, _on_host

    records = []
    for first in (True, False):
        side, context = Side(PLAIN, on_cpu=not first), solo_context(place(bench, first=first))
        config, objective, collate_class = change(bench.config(side, second=not first))
        plan, size = training_plan_of(config, 1), config.batch.micro_batch_size
        vocabulary = vocabulary_size(config)
        padded = padded_vocab_size(vocabulary, config.model, 1)
        engine = build_model(Vocabulary(vocabulary, padded, None, None), context, config, plan, objective)
        collate = collate_class.of(config, vocabulary, context, 3 + int(bench.spoil > 0 and not first))

        def batches(
            step: Step,
            config: Config = config,
            collate: Callable[..., MicroBatch] = collate,
            vocabulary: int = vocabulary,
            size: int = size,
        ) -> Sequence[MicroBatch]:
            rng = np.random.default_rng(step.before.iteration)
            arrays = pairs(rng, step.batch_size, config.model.seq_length, vocabulary)
            starts = range(0, step.batch_size, size)
            rows = [slice(start, start + size) for start in starts]
            numbers = [tuple(range(row.start, row.stop)) for row in rows]
            return [
                collate({k: v[row] for k, v in arrays.items()}, own)
                for row, own in zip(rows, numbers, strict=True)
            ]

        with on_device(bench, first=first):
            records.append(_on_host(record_steps(engine, plan, 3, batches)))
    return near(*records)


def use_checks() -> Iterator[tuple[str, Callable[[Bench], Verdict]]]:
    """The rows by name."""
    yield "fp32 products with codes", products
    yield "fp32 served", partial(served, bound=LOGS)
    yield "fp32 scored, int8 cache", partial(served, bound=CODED_LOGS, coded=True, drawn=False)
    yield "fp32 policy gradients", partial(answers, twice=False)
    yield "policy gradients twice the same", partial(answers, twice=True)
    for name, settings in (("sigmoid", {"preference_sft_coeff": 0.5}), ("orpo", {})):
        changed = partial(preferred, {"preference_loss": name, **settings})
        yield f"fp32 preferences {name}", partial(on_pairs, change=changed)
    for name, settings in (
        ("last token", {"center_rewards_coefficient": 0.05}),
        ("per token", {"reward_loss": "per_token"}),
    ):
        yield f"fp32 rewards {name}", partial(on_pairs, change=partial(rewarded, settings))
