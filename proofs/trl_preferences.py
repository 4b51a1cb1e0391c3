"""Proof: losses and gradients of chats and preferences are those of TRL's trainers.

`python proofs/trl_preferences.py --trl PYTHON` needs a Python with TRL. A small Llama is trained for three
steps of plain gradient descent, by TRL's `SFTTrainer` on the marked answers of conversations, and by its
`DPOTrainer` with each loss that both have; and here, from the same folder on the same files, by `--task chat`
and `--task preference`. The reference is the initial model, so the losses of the steps after the first have
margins. A JSON line for each task has the largest differences of losses and of elements of gradients; the
exit status is 1 if one is above 1e-6, or above 1e-6 of the largest element where that is larger than one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megazero.checkpoint.part import Key, Part  # noqa: E402
from megazero.config.resolve import parse_config  # noqa: E402
from megazero.config.training_plan import training_plan_of  # noqa: E402
from megazero.data.build_report import ProgressLog  # noqa: E402
from megazero.formats.hf.writer import write_hf  # noqa: E402
from megazero.mpu.context import solo_context  # noqa: E402
from megazero.post_training.outputs import outputs_of  # noqa: E402
from megazero.post_training.preference import PreferenceTask  # noqa: E402
from megazero.post_training.reference import sums_of  # noqa: E402
from megazero.post_training.run import read_task  # noqa: E402
from megazero.train.build import build_model  # noqa: E402
from megazero.train.finetuning.epochs import feed_of  # noqa: E402
from megazero.train.folders import read_folder  # noqa: E402
from megazero.train.parts.vocabulary import build_vocabulary  # noqa: E402
from megazero.train.resume.resume import Resumed  # noqa: E402
from megazero.verify.record import record_steps  # noqa: E402
from tests.data.conversations.templates import LLAMA_3  # noqa: E402
from tests.data.conversations.tokenizer import byte_level, write_folder  # noqa: E402
from tests.post_training.samples import make_files  # noqa: E402

STEPS, RATE, LENGTH, TOLERANCE = 3, 0.05, 64, 1e-6
TASKS: dict[str, tuple[str, dict[str, object]]] = {
    "chat": ("--task chat", {}),
    "sigmoid": ("--task preference", {"loss_type": ["sigmoid"]}),
    "robust": (
        "--task preference --preference-loss robust --preference-label-smoothing 0.2",
        {"loss_type": ["robust"], "label_smoothing": 0.2},
    ),
    "ipo": (  # with a smaller beta, the square of the margin is far from one
        "--task preference --preference-loss ipo --preference-beta 0.5",
        {"loss_type": ["ipo"], "beta": 0.5},
    ),
    "hinge": ("--task preference --preference-loss hinge", {"loss_type": ["hinge"]}),
    "sigmoid_norm": ("--task preference --preference-loss sigmoid_norm", {"loss_type": ["sigmoid_norm"]}),
    "apo_zero": ("--task preference --preference-loss apo_zero", {"loss_type": ["apo_zero"]}),
    "sigmoid + sft": (
        "--task preference --preference-sft-coeff 0.5",
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    ),
}

_TRL = """import json, sys, torch, transformers, trl, datasets
from pathlib import Path
from safetensors.torch import save_file
torch.set_num_threads(1)
folder, tasks, steps, rate = Path(sys.argv[1]), *map(json.loads, sys.argv[2:5])
words = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
words.pad_token = "<pad>"
losses = []
class Grads(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradients = {k: p.grad.clone() for k, p in model.named_parameters()}
        save_file(gradients, folder / f"{name}-{state.global_step}.safetensors")
def noting(kind):
    class Noting(kind):
        def training_step(self, *args, **kwargs):
            losses.append(float(super().training_step(*args, **kwargs)))
            return torch.tensor(losses[-1])
    return Noting
out = {}
for name, options in tasks.items():
    losses.clear()
    options_of_model = dict(attn_implementation="eager", dtype=torch.float32)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, **options_of_model)
    chat = name == "chat"
    rows = [json.loads(line) for line in open(folder / ("chats.jsonl" if chat else "pairs.jsonl"))]
    common = dict(output_dir=str(folder / "trl"), use_cpu=True, report_to=[], bf16=False, max_steps=steps,
                  per_device_train_batch_size=len(rows), gradient_accumulation_steps=1, max_grad_norm=0.0,
                  learning_rate=rate, lr_scheduler_type="constant", save_strategy="no", max_length=None,
                  gradient_checkpointing=False)
    kind, settings = (trl.SFTTrainer, trl.SFTConfig(**common, assistant_only_loss=True)) if chat else (
        trl.DPOTrainer, trl.DPOConfig(**common, **options))
    noting(kind)(model, args=settings, train_dataset=datasets.Dataset.from_list(rows), processing_class=words,
                 callbacks=[Grads()], optimizers=(torch.optim.SGD(model.parameters(), rate), None)).train()
    out[name] = list(losses)
(folder / "losses.json").write_text(json.dumps(out))
versions = {m.__name__: m.__version__ for m in (trl, transformers, torch)}
(folder / "versions.json").write_text(json.dumps(versions))
"""


class _Tensors:
    """Whole logical tensors as a `Source`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = tensors

    @property
    def shapes(self) -> dict[Key, tuple[int, ...]]:
        return {Key(name): tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, parts: Iterable[Part]) -> None:
        for part in parts:
            part.tensor.copy_(self._tensors[part.key.name][part.box.within(part.box.whole(part.shape))])


def make_model(folder: Path) -> None:
    """A Llama of two layers with a tokenizer, conversations, and pairs of answers in one form."""
    import transformers

    make_files(folder)
    write_folder(folder, byte_level(), LLAMA_3, eos="<|eot_id|>")
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    plain = [{k: [row[k][1]] for k in ("chosen", "rejected")} for row in rows if "prompt" not in row]
    asked = [{"prompt": row["chosen"][:1]} for row in rows if "prompt" not in row]
    plain = [{**a, **b} for a, b in zip(asked, plain, strict=True)]
    plain += [row for row in rows if isinstance(row.get("prompt"), list)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain))
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=360,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.1,
        eos_token_id=6,
        **sizes,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def ours(folder: Path, flags: str, place: Path) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """The losses of the steps, and their gradients by transformers' names."""
    file = "chats" if "chat" in flags else "pairs"
    count = len((folder / f"{file}.jsonl").read_text().splitlines())
    line = (
        f"--load-hf {folder} {flags} --train-data {folder}/{file}.jsonl --seq-length {LENGTH} "
        f"--epochs {STEPS} "
        f"--micro-batch-size 1 --global-batch-size {count} --optimizer sgd --sgd-momentum 0 --clip-grad 0 "
        f"--lr {RATE} --lr-decay-style constant --weight-decay 0 --num-workers 0 "
        "--make-vocab-size-divisible-by 1"
    )
    config = parse_config(line.split(), world_size=1, reader=read_folder).config
    context, vocabulary, task = solo_context(), build_vocabulary(config), read_task(config)
    config = task.completed(config, context)
    plan = training_plan_of(config, 1)
    engine = build_model(vocabulary, context, config, plan, task.objective(config))
    task.begin(config, context, vocabulary.size, engine)
    feeds = task.feeds(Resumed(engine, 1, config, plan), vocabulary, context)
    if isinstance(task, PreferenceTask):
        feed = feed_of(
            config, context, task.splits.train, task.collate(config, vocabulary.size, context, None)
        )
        outputs = outputs_of(engine, config, feed, ProgressLog(str, ""))
        task.splits.train.reference[:] = sums_of(outputs, task.splits.train)
    record = record_steps(engine, plan, STEPS, feeds.train.of_step)
    terms = engine.executor.terms
    losses = [sum(t.coefficient * step[t.label] for t in terms if t.trained) for step in record.losses]
    gradients = []
    for step, gradient in enumerate(record.gradients):
        write_hf(_Tensors(gradient), config.model, vocabulary.size, place / str(step), dtype=torch.float32)
        (file,) = (place / str(step)).glob("*.safetensors")
        gradients.append(load_file(file))
    return losses, gradients


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trl", required=True, metavar="PYTHON", help="a Python with TRL")
    args = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        options = json.dumps({task: options for task, (_, options) in TASKS.items()})
        words = [args.trl, "-c", _TRL, str(folder), options, str(STEPS), str(RATE)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=_environment())
        print((folder / "versions.json").read_text(), flush=True)
        theirs = json.loads((folder / "losses.json").read_text())
        for task, (flags, _) in TASKS.items():
            with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
                losses, gradients = ours(folder, flags, Path(place))
            gap, largest = 0.0, 0.0
            for step, gradient in enumerate(gradients):
                wanted = load_file(folder / f"{task}-{step}.safetensors")
                assert wanted.keys() == gradient.keys(), wanted.keys() ^ gradient.keys()
                largest = max(largest, *(float(g.abs().max()) for g in wanted.values()))
                gap = max(gap, *(float((gradient[k] - wanted[k]).abs().max()) for k in wanted))
            loss_gap = max(abs(a - b) for a, b in zip(losses, theirs[task], strict=True))
            bad += loss_gap > TOLERANCE * max(1.0, *losses) or gap > TOLERANCE * max(1.0, largest)
            facts = {"task": task, "losses": losses, "loss gap": loss_gap, "gradient gap": gap}
            print(json.dumps({**facts, "largest gradient": largest}), flush=True)
    return 1 if bad else 0


def _environment() -> dict[str, str]:
    import os

    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}


if __name__ == "__main__":
    sys.exit(main())
