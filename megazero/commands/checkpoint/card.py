"""The model card that `to-hf` writes: a README.md as the Hugging Face Hub reads it, of recorded facts alone.

What neither the checkpoint nor the metrics of its run say is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from megazero.checkpoint.reader import CheckpointReader
from megazero.commands.checkpoint.summary import layout_of, pick, programs_of
from megazero.commands.show import one_line
from megazero.data.blended import parse_blend
from megazero.errors import DataError
from megazero.formats.hf.writer import Exported
from megazero.report.run_folder import METRICS, beside

_PIPELINES: Mapping[str, str] = MappingProxyType(
    {
        "AutoModelForCausalLM": "text-generation",
        "AutoModelForMaskedLM": "fill-mask",
        "AutoModelForPreTraining": "fill-mask",
        "AutoModelForSequenceClassification": "text-classification",
    }
)
_MODEL = """num_layers t5_encoder_layers t5_decoder_layers hybrid_layer_pattern hidden_size ffn_hidden_size
num_attention_heads num_query_groups num_experts max_position_embeddings position_embedding_type normalization
activation"""
_TRAINING = """finetune.pretrained_checkpoint checkpoint.load_hf model.seq_length batch.micro_batch_size
optimizer.optimizer optimizer.lr optimizer.lr_decay_style optimizer.min_lr optimizer.weight_decay
optimizer.clip_grad model.hidden_dropout model.attention_dropout precision.dtype"""
_DATA = "data.data_path data.train_data_path data.valid_data_path data.test_data_path"
_LABELLED = "finetune.train_data finetune.valid_data finetune.test_data"
_SCORES = ("perplexity", "accuracy", "macro_f1")
_END = """
This card was written by `megazero checkpoint to-hf`, from what the checkpoint and the metrics of its run
record. They do not say what the data contain, whose they are, or what the model is fit for.
"""
_Row = tuple[str, object]


def model_card(
    reader: CheckpointReader, exported: Exported, has_tokenizer: bool, license: str | None = None
) -> str:
    """Return the card of a model that is written for transformers.

    Args:
        reader: the checkpoint.
        exported: what is written.
        has_tokenizer: whether a tokenizer is written beside the weights.
        license: the licence by the Hub's name; None leaves it out.
    """
    facts, name = reader.facts, one_line(exported.folder.name)
    config = pick(facts, "config") or facts
    family, origin = pick(config, "model", "family"), pick(facts, "converted_from", "architecture")
    front = {
        "license": license,
        "library_name": "transformers",
        "pipeline_tag": _PIPELINES.get(exported.auto),
        "tags": ["megazero", *([str(family)] if family else [])],
    }
    known = {key: value for key, value in front.items() if value}
    trained = "trained" if pick(facts, "state") else "converted"
    done = "fine-tuned" if pick(config, "finetune", "task") else trained
    classes = [exported.auto, *(["AutoTokenizer"] if has_tokenizer else [])]
    pairs = zip(("model", "tokenizer"), classes, strict=False)
    loads = [f"{variable} = {auto}.from_pretrained({name!r})" for variable, auto in pairs]
    parts = [
        f"---\n{yaml.safe_dump(known, sort_keys=False)}---\n\n# {name}\n",
        f"A `{exported.architecture}` of {exported.parameters:,} parameters, {done} with megazero."
        + (f" Its first weights were those of a `{one_line(origin)}`." if origin else ""),
        "\n".join(["\n```python", f"from transformers import {', '.join(classes)}", *loads, "```"]),
        _table("Model", _model(facts, config, exported)),
        _table("Data", _data(config)),
        _table("Training", _training(facts, config) if pick(facts, "state") else []),
        _table("Losses", _losses(reader)),
        _END,
    ]
    return "\n".join(part for part in parts if part)


def _settings(config: object, paths: str) -> list[_Row]:
    return [(path.rpartition(".")[2], pick(config, *path.split("."))) for path in paths.split()]


def _model(facts: Mapping[str, object], config: object, exported: Exported) -> list[_Row]:
    return [
        ("parameters", f"{exported.parameters:,} in {exported.dtype}"),
        *_settings(pick(config, "model"), _MODEL),
        *(_settings(config, "model.moe_router_topk") if pick(config, "model", "num_experts") else []),
        ("vocabulary", pick(facts, "vocab_size")),
        ("labels", pick(config, "finetune", "labels")),
    ]


def _data(config: object) -> list[_Row]:
    """The datasets with their weights, the labelled files, and the tokenizer."""
    rows: list[_Row] = []
    for name, words in _settings(config, _DATA):
        try:
            blend = parse_blend(words, must_exist=False) if isinstance(words, list) and words else []
            rows += [(name, f"`{path}`" + ("" if w is None else f", weight {w:g}")) for w, path in blend]
        except DataError:
            rows.append((name, words))
    split, mock, task = _settings(config, "data.split data.mock_data finetune.task")
    files = [pick(config, "tokenizer", key) for key in ("tokenizer_model", "vocab_file", "merge_file")]
    names = [f"`{Path(str(file)).name}`" for file in files if file]
    return [
        *rows,
        *([split] if pick(config, "data", "data_path") else []),
        ("data_path", "random tokens" if mock[1] else None),
        task,
        *_settings(config, _LABELLED),
        ("tokenizer", " ".join([str(pick(config, "tokenizer", "tokenizer_type") or ""), *names])),
    ]


def _training(facts: Mapping[str, object], config: object) -> list[_Row]:
    optimizer, lengths = pick(config, "optimizer"), pick(facts, "lengths")
    own = f"{pick(optimizer, 'optimizer')}_"
    spans = [(part, pick(lengths, part)) for part in ("warmup", "decay")]
    schedule = [f"{part} {count} {pick(lengths, 'unit')}" for part, count in spans if count]
    return [
        *_settings(facts, "state.iteration state.consumed_samples state.consumed_tokens global_batch_size"),
        *_settings(config, _TRAINING),
        *_settings(optimizer, " ".join(key for key in optimizer or () if key.startswith(own))),
        ("schedule", schedule),
        ("seed", str(pick(config, "training", "seed") or "")),
        ("best_metric", pick(facts, "best_metric")),
        ("layout", str(layout_of(facts) or "")),
        ("saved", pick(facts, "time")),
        ("versions", programs_of(facts)),
    ]


def _losses(reader: CheckpointReader) -> list[_Row]:
    """Losses and scores of the last step and of the last evaluation of each split up to a checkpoint.

    The files of `--metrics-jsonl` are looked for where the run wrote them, in the run's folder and beside it;
    those of a run without that flag are in its folder. They are believed if the line of the checkpoint's
    iteration counts the same samples.
    """
    facts, iteration, run = reader.facts, reader.manifest.iteration, reader.folder.parent
    path = Path(str(pick(facts, "config", "logging", "metrics_jsonl") or run / METRICS))
    for file in (path, run / path.name, run.parent / path.name):
        steps = [line for line in _lines(file, str(iteration)) if line.get("iteration") == iteration]
        if steps and steps[-1].get("consumed_samples") == pick(facts, "state", "consumed_samples"):
            last = {"training": steps[-1]}
            for line in _lines(beside(file, "eval")):
                if isinstance(line.get("iteration"), int) and line["iteration"] <= iteration:
                    last[str(line.get("split"))] = line
            return [
                (f"{split}, iteration {line['iteration']:,}", _scores(line)) for split, line in last.items()
            ]
    recent = pick(facts, "state", "recent", "losses")
    loss = recent[-1] if isinstance(recent, list) and recent else None
    return [("training", _scores({"loss": loss})), ("validation", _scores(facts))]


def _scores(line: Mapping[str, Any]) -> list[str]:
    return [
        f"{name.replace('_', ' ')} {value:.4f}"
        for name, value in line.items()
        if isinstance(value, float) and (name.endswith("loss") or name in _SCORES)
    ]


def _lines(path: Path, number: str = "") -> Iterator[dict[str, Any]]:
    """The objects of a file whose lines begin with a number, or of all; damaged lines are passed over."""
    with suppress(OSError, UnicodeDecodeError), path.open(encoding="utf-8") as file:
        for line in file:
            with suppress(ValueError):
                if number in line[:40] and isinstance(value := json.loads(line), dict):
                    yield value


def _table(title: str, rows: Iterable[_Row]) -> str:
    """A section with the rows that have a value; empty without any."""
    cells = [
        (label.replace("_", " "), one_line(_text(value)).replace("|", r"\|"))
        for label, value in rows
        if value not in (None, "", [])
    ]
    lines = ["", f"## {title}", "", "| | |", "|---|---|", *(f"| {label} | {cell} |" for label, cell in cells)]
    return "\n".join(lines) if cells else ""


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
