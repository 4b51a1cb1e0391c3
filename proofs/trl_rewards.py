"""Rewards: losses and gradients beside those of TRL's RewardTrainer, on the same small Llama in fp32.

    python proofs/trl_rewards.py --trl /path/to/a/python/with/trl

TRL runs in a Python of its own, since it pins other versions. Prints, for each loss, the difference of the
losses, and the largest difference of a gradient, over the largest gradient of that tensor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CASES = {
    "pairs": {},
    "margins": {"margins": True},
    "centered": {"center": 0.01},
    "centered, margins": {"center": 0.5, "margins": True},
}
PAIRS, LONGEST, LAYERS = 6, 24, 2
_BOUND = 1e-6

_TRL = """
import json, sys
from pathlib import Path
import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
rows, losses = json.loads((folder / "pairs.json").read_text()), {}
for name, case in cases.items():
    kept = [row if case.get("margins") else {k: v for k, v in row.items() if k != "margin"} for row in rows]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, pad_token="<pad>")
    args = RewardConfig(
        output_dir=str(folder / "out"), use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False,
        per_device_train_batch_size=len(rows), max_length=None, remove_unused_columns=False,
        center_rewards_coefficient=case.get("center"),
    )
    rows_of = Dataset.from_list(kept)
    trainer = RewardTrainer(model=model, args=args, train_dataset=rows_of, processing_class=tokenizer)
    (batch,) = trainer.get_train_dataloader()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    losses[name] = loss.item()
    grads = {n: p.grad.contiguous() for n, p in trainer.model.named_parameters() if p.grad is not None}
    save_file(grads, folder / f"{name}.safetensors")
(folder / "losses.json").write_text(json.dumps(losses))
"""


def make(folder: Path) -> None:
    """A small Llama with a score, its tokenizer, and pairs of token ids with a common beginning."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from tests.data.conversations.tokenizer import byte_level, write_folder

    backend = byte_level()
    write_folder(folder, backend)
    pad = backend.token_to_id("<pad>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=backend.get_vocab_size(),
        num_hidden_layers=LAYERS,
        max_position_embeddings=LONGEST,
        num_labels=1,
        pad_token_id=pad,
        initializer_range=0.1,
        **sizes,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(PAIRS):
        begin, one, other = (rng.integers(20, 300, rng.integers(3, 9)).tolist() for _ in range(3))
        rows.append({"chosen_ids": begin + one, "rejected_ids": begin + other, "margin": float(rng.normal())})
    (folder / "pairs.json").write_text(json.dumps(rows))


def ours(folder: Path, center: float = 0.0, margins: bool = False):
    """The loss and the gradients, by transformers' names, of our chunk with the folder's weights."""
    import numpy as np
    import torch

    from megazero.checkpoint.part import Key, Part
    from megazero.checkpoint.shards import parts_of_parameters
    from megazero.config.preference.rewards import RewardConfig
    from megazero.config.tree.config import Config
    from megazero.config.tree.optimizer import OptimizerConfig
    from megazero.config.tree.training import BatchConfig, TrainingConfig
    from megazero.data.preferences.dataset import PairSamples
    from megazero.data.preferences.pairs import Pairs
    from megazero.formats.hf.reader import HFReader
    from megazero.formats.hf.stream import WeightStream
    from megazero.mpu.context import solo_context
    from megazero.mpu.param_spec import spec_of
    from megazero.post_training.scores import PairCollate, RewardLoss
    from megazero.train.parts.chunks import build_chunks
    from megazero.train.parts.vocabulary import Vocabulary

    with HFReader(folder) as reader:
        size, context = reader.description.vocab_size, solo_context()
        changes = {"make_vocab_size_divisible_by": 1, "vocab_size": size, "seq_length": LONGEST}
        config = Config(
            model=reader.description.model.model_copy(update=changes),
            batch=BatchConfig(micro_batch_size=PAIRS, global_batch_size=PAIRS),
            optimizer=OptimizerConfig(lr=1e-3),
            training=TrainingConfig(train_iters=1),
            reward=RewardConfig(center_rewards_coefficient=center),
        )
        (chunk,) = build_chunks(config, Vocabulary(size, size, None, None), context, context.device).values()
        reader.read(parts_of_parameters(chunk.parameters(), context))
        architecture = reader.description.architecture
    rows = json.loads((folder / "pairs.json").read_text())
    sides = [np.array(row[side]) for row in rows for side in ("chosen_ids", "rejected_ids")]
    offsets = np.concatenate([[0], np.cumsum([len(side) for side in sides])])
    given = np.array([row["margin"] if margins else 0.0 for row in rows], np.float32)
    pairs = Pairs(np.concatenate(sides), offsets, np.full(2 * PAIRS, 3), given)
    collate = PairCollate.of(config, size, context, None)
    batch = collate(PairSamples(pairs, LONGEST).batch(range(PAIRS)), tuple(range(PAIRS)))
    run = RewardLoss(config.reward).on_chunk(chunk)
    sums = run.run(batch).terms
    loss = sum(term.coefficient * sums[term.name] / batch.counts[term.over] for term in run.terms)
    assert isinstance(loss, torch.Tensor)
    loss.backward()

    class Gradients:
        """The gradients as a source of tensors."""

        def __init__(self) -> None:
            self.tensors = {Key(spec_of(p).name): p.grad for p in chunk.parameters()}
            self.shapes = {key: tuple(grad.shape) for key, grad in self.tensors.items()}

        def read(self, parts: list[Part]) -> None:
            for part in parts:
                part.tensor.copy_(self.tensors[part.key][part.box.slices])

    stream = WeightStream.of_model(Gradients(), architecture, config.model, size)
    return loss.item(), dict(stream)


def main() -> int:
    """Compare; returns 1 if anything differs by more than the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trl", required=True, help="the Python of an environment with TRL")
    trl = parser.parse_args().trl
    from safetensors.torch import load_file

    bad = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder)
        subprocess.run([trl, "-c", _TRL, str(folder), json.dumps(CASES)], check=True)
        theirs = json.loads((folder / "losses.json").read_text())
        for case, settings in CASES.items():
            loss, grads = ours(folder, **settings)
            known = load_file(folder / f"{case}.safetensors")
            assert known.keys() == grads.keys(), known.keys() ^ grads.keys()
            apart = max(
                ((grads[key] - known[key]).abs().max() / known[key].abs().max()).item() for key in known
            )
            off = abs(loss - theirs[case])
            bad += off > _BOUND or apart > _BOUND * 10
            largest = max((grads[key] - known[key]).abs().max().item() for key in known)
            print(
                f"{case:18} loss {loss:.7f}, TRL's {theirs[case]:.7f}, apart {off:.1e}; "
                f"gradients apart {largest:.1e} ({apart:.1e} of a tensor's largest), {len(known)} tensors"
            )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
