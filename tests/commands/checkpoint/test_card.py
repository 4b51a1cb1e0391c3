"""The model card that `to-hf` writes: recorded facts, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from megazero.cli import main
from megazero.config.tree.tokenizer import TokenizerConfig
from tests.formats.hf.samples import LLAMA, config_for, their_tensors, write_folder
from tests.formats.hf.test_convert import save_as_trained
from tests.tables import over_table

CONFIG = {
    "model": LLAMA.model_dump(mode="json"),
    "tokenizer": {},
    "data": {"data_path": ["0.7", "data/web|x", "0.3", "data/code"], "split": "96,4,0", "mock_data": False},
    "batch": {"micro_batch_size": 2, "global_batch_size": 8},
    "optimizer": {
        "optimizer": "adam",
        "adam_beta2": 0.95,
        "muon_momentum": 0.9,
        "lr": 3e-4,
        "weight_decay": 0.1,
    },
    "precision": {"dtype": "bf16"},
    "parallel": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
    },
    "zero": {"stage": 1},
    "training": {"seed": 1234},
    "logging": {"metrics_jsonl": "m.jsonl"},
}
FACTS = {
    "config": CONFIG,
    "state": {
        "iteration": 40,
        "consumed_samples": 320,
        "consumed_tokens": 40960,
        "recent": {"losses": [6.5, 6.25]},
    },
    "global_batch_size": 8,
    "lengths": {"unit": "iters", "warmup": 4, "decay": 40},
    "written_by": {"world_size": 4, "megazero": "0.1.0", "git": None, "torch": "2.13.0"},
    "time": "2026-11-30T03:02:03Z",
}
STEPS = (
    {"iteration": 39, "consumed_samples": 312, "lm_loss": 9.0},
    {"iteration": 40, "consumed_samples": 320, "lm_loss": 6.125, "grad_norm": 1.0},
    {"iteration": 41, "consumed_samples": 328, "lm_loss": 1.0},
)
EVALUATIONS = (
    {"iteration": 20, "split": "validation", "lm_loss": 7.0, "perplexity": 1096.6},
    {"iteration": 40, "split": "validation", "lm_loss": 6.5, "perplexity": 665.1416, "seconds": 1.5},
    {"iteration": 60, "split": "validation", "lm_loss": 1.0},
)


def card_of(folder: Path, facts: dict[str, object], *flags: str) -> str:
    """Write a checkpoint with these facts for transformers; its card."""
    save_as_trained(folder / "run", LLAMA, TokenizerConfig(), **facts)
    assert (
        main(["checkpoint", "to-hf", str(folder / "run"), str(folder / "out"), "--no-tokenizer", *flags]) == 0
    )
    return (folder / "out" / "README.md").read_text(encoding="utf-8")


def rows(card: str) -> dict[str, str]:
    """The cells of all tables: label -> value."""
    return dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", card, re.M))


def write_metrics(folder: Path, steps: tuple[dict[str, object], ...] = STEPS) -> None:
    for name, lines in (("m.jsonl", steps), ("m.eval.jsonl", EVALUATIONS)):
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (folder / name).write_text('{"iteration": 40, "consumed_samp\n' + text)


def test_a_card_says_what_the_checkpoint_and_its_metrics_record(tmp_path):
    write_metrics(tmp_path)
    card = card_of(tmp_path, FACTS, "--license", "apache-2.0")
    assert card.startswith(
        "---\nlicense: apache-2.0\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n"
        "- megazero\n- gpt\n---\n\n# out\n\nA `LlamaForCausalLM` of "
    )
    assert re.search(r"of ([\d,]+) parameters, trained with megazero\.\n", card)
    assert "\nmodel = AutoModelForCausalLM.from_pretrained('out')\n" in card
    assert "AutoTokenizer" not in card, "none was written"
    assert "| data path | `data/web\\|x`, weight 0.7 |\n| data path | `data/code`, weight 0.3 |\n" in card
    expected = {
        "num layers": str(LLAMA.num_layers),
        "split": "96,4,0",
        "consumed tokens": "40,960",
        "global batch size": "8",
        "optimizer": "adam",
        "adam beta2": "0.95",
        "lr": "0.0003",
        "dtype": "bf16",
        "schedule": "warmup 4 iters, decay 40 iters",
        "layout": "4 ranks: tensor 2 x pipeline 1 x data 2, ZeRO stage 1",
        "versions": "megazero 0.1.0, torch 2.13.0",
        "training, iteration 40": "lm loss 6.1250",
        "validation, iteration 40": "lm loss 6.5000, perplexity 665.1416",
    }
    cells = rows(card)
    assert {label: cells.get(label) for label in expected} == expected
    assert not {"muon momentum", "clip grad", "git", "moe router topk", "task", "best metric"} & cells.keys()


def test_a_run_that_names_no_file_of_metrics_has_them_in_its_folder(tmp_path):
    """The card of every run that was only saved lacked its losses."""
    (tmp_path / "run").mkdir()
    write_metrics(tmp_path)
    for kind in ("", ".eval"):
        (tmp_path / f"m{kind}.jsonl").rename(tmp_path / "run" / f"metrics{kind}.jsonl")
    cells = rows(card_of(tmp_path, {**FACTS, "config": {**CONFIG, "logging": {"metrics_jsonl": None}}}))
    assert cells["training, iteration 40"] == "lm loss 6.1250"
    assert cells["validation, iteration 40"] == "lm loss 6.5000, perplexity 665.1416"


def test_metrics_of_another_run_are_not_believed(tmp_path):
    write_metrics(tmp_path, tuple({**step, "consumed_samples": 7} for step in STEPS))
    cells = rows(card_of(tmp_path, FACTS))
    assert cells["training"] == "loss 6.2500", "the checkpoint's own"
    assert not {label for label in cells if "iteration " in label}


def test_the_figures_of_a_best_model_are_shown_without_metrics(tmp_path):
    cells = rows(
        card_of(tmp_path, {**FACTS, "accuracy": 0.75, "macro_f1": 0.5, "loss": 0.25, "best_metric": "loss"})
    )
    assert cells["validation"] == "accuracy 0.7500, macro f1 0.5000, loss 0.2500"
    assert cells["best metric"] == "loss"


def test_of_a_converted_model_no_training_is_told(tmp_path):
    write_folder(tmp_path / "hf", config_for(LLAMA), their_tensors(LLAMA))
    assert main(["checkpoint", "from-hf", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    assert main(["checkpoint", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "converted with megazero. Its first weights were those of a `LlamaForCausalLM`.\n" in card
    assert re.findall("^## (.+)", card, re.M) == ["Model"]


@over_table(
    ("facts", "absent"),
    [
        ({"config": {**CONFIG, "data": {"data_path": 5}}}, "data path"),
        ({"config": {**CONFIG, "optimizer": None, "logging": {"metrics_jsonl": 5}}}, "optimizer"),
        ({"state": {"iteration": 40, "recent": {"losses": "none"}}}, "training"),
        ({"lengths": 5, "written_by": []}, "schedule"),
    ],
)
def test_what_is_not_as_a_run_records_it_is_left_out(facts, absent, tmp_path):
    assert absent not in rows(card_of(tmp_path, {**FACTS, **facts}))


@pytest.mark.parametrize("license", [None, "mit", "no: [a\nb"])
def test_the_hub_reads_the_front_matter(tmp_path, license):
    flags = [] if license is None else ["--license", license]
    card = card_of(tmp_path, FACTS, *flags)
    front = yaml.safe_load(card.split("---\n")[1])
    assert front.get("license") == license
    hub = pytest.importorskip("huggingface_hub")
    read = hub.ModelCard(card)
    assert read.data.to_dict() == hub.ModelCardData(**front).to_dict() == front
    assert read.text.startswith("\n# out\n")


def test_a_card_that_is_there_stays(tmp_path, capsys):
    save_as_trained(tmp_path / "run", LLAMA, TokenizerConfig())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("mine")
    assert main(["checkpoint", "to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--no-tokenizer"]) == 1
    assert "must be new or an empty folder" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in (tmp_path / "out").iterdir()] == [("README.md", "mine")]
