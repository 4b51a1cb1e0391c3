"""Rewards: losses and gradients beside those of TRL's RewardTrainer, on the same small Llama in fp32.

    python proofs/trl_rewards.py --trl /path/to/a/python/with/trl

TRL runs in a Python of its own, since it pins other versions. The same Llama in float64, written out below in
plain PyTorch, tells which of the two is nearer. Prints, for each loss, the losses, and how far gradients are
apart: the norm of the difference, over theirs.
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
_BASE = 10000.0
_KINDS = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{kind}_proj" for kind in "qkvo"),
    *(f"mlp.{kind}_proj" for kind in ("gate", "up", "down")),
)

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


def exact(folder: Path, center: float = 0.0, margins: bool = False):
    """The loss and the gradients, by transformers' names, of the same Llama in float64, row by row."""
    import torch
    from safetensors.torch import load_file
    from torch.nn.functional import logsigmoid, silu

    stated = json.loads((folder / "config.json").read_text())
    weights = {
        name: w.double().requires_grad_() for name, w in load_file(folder / "model.safetensors").items()
    }
    heads, groups = stated["num_attention_heads"], stated["num_key_value_heads"]
    width = stated["hidden_size"] // heads

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return weights[name] * x * (x.square().mean(-1, keepdim=True) + stated["rms_norm_eps"]).rsqrt()

    def rotated(x: torch.Tensor) -> torch.Tensor:
        rates = _BASE ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = (torch.arange(len(x)).double()[:, None] * rates)[:, None]
        one, other = x.chunk(2, -1)
        return torch.cat(
            [one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()], -1
        )

    def score(ids: list[int]) -> torch.Tensor:
        x = weights["model.embed_tokens.weight"][torch.tensor(ids)]
        hidden = torch.ones(len(ids), len(ids)).triu(1).bool()
        for layer in range(LAYERS):
            own = {kind: f"model.layers.{layer}.{kind}.weight" for kind in _KINDS}
            y = normed(x, own["input_layernorm"])
            q, k, v = (
                (y @ weights[own[f"self_attn.{kind}_proj"]].T).view(len(ids), -1, width) for kind in "qkv"
            )
            q, k, v = rotated(q), *(t.repeat_interleave(heads // groups, 1) for t in (rotated(k), v))
            shares = (
                (torch.einsum("qhd,khd->hqk", q, k) / width**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
            )
            seen = torch.einsum("hqk,khd->qhd", shares, v).flatten(1)
            x = x + seen @ weights[own["self_attn.o_proj"]].T
            y = normed(x, own["post_attention_layernorm"])
            gate, up = (y @ weights[own[f"mlp.{kind}_proj"]].T for kind in ("gate", "up"))
            x = x + (silu(gate) * up) @ weights[own["mlp.down_proj"]].T
        return (normed(x[-1], "model.norm.weight") @ weights["score.weight"].T).squeeze()

    rows = json.loads((folder / "pairs.json").read_text())
    chosen, rejected = (torch.stack([score(row[f"{s}_ids"]) for row in rows]) for s in ("chosen", "rejected"))
    given = torch.tensor([row["margin"] if margins else 0.0 for row in rows], dtype=torch.float64)
    loss = (center * (chosen + rejected).square() - logsigmoid(chosen - rejected - given)).mean()
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in weights.items()}


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
            true, gradients = exact(folder, **settings)
            assert gradients.keys() == known.keys()

            def apart(some: dict, others: dict) -> float:
                """The norm of the difference of all gradients, over theirs."""
                pairs = [(some[key].double(), others[key].double()) for key in some]
                squares = sum((one - other).square().sum() for one, other in pairs)
                return (squares / sum(other.square().sum() for _, other in pairs)).sqrt().item()

            here, there = apart(grads, gradients), apart(known, gradients)
            bad += max(abs(loss - theirs[case]), apart(grads, known)) > _BOUND
            largest = max((grads[key] - known[key]).abs().max().item() for key in known)
            print(
                f"{case:18} loss {loss:.7f}, TRL's {theirs[case]:.7f}, in float64 {true:.7f}; gradients: "
                f"apart {apart(grads, known):.1e}, at most {largest:.1e}; from float64 {here:.1e}, TRL's "
                f"{there:.1e}"
            )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
