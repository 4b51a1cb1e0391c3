"""DeepSpeed's universal form of Megatron-DeepSpeed's checkpoints, made here and by DeepSpeed's converter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError, DamagedCheckpointError
from megazero.formats.megatron.reader import ImportOptions, MegatronReader
from tests.formats.megatron.optimizer_samples import (
    MOMENTS,
    STEP,
    Kinds,
    by_module,
    flat,
    save_zero,
)
from tests.formats.megatron.samples import (
    GPT2,
    LLAMA,
    VOCAB,
    Layout,
    chunk_of,
    dialect_of,
    edit,
    slice_of,
)
from tests.formats.megatron.test_rank_optimizer import ADAM, assert_read, kinds_of
from tests.formats.megatron.test_reader import TRUSTED, UNTIED, assert_same, read_all

WORDS = ("word_embeddings.weight", "lm_head.weight", "output_layer.weight")


def names_of(weights: dict[str, Tensor], model: ModelConfig, *, pipeline: bool) -> dict[str, Tensor]:
    """Whole tensors by Megatron-DeepSpeed's names, without padding of the vocabulary."""
    untied = UNTIED if model.untie_embeddings_and_output_weights else {}
    old = Layout(dialect="old", arguments=untied)
    whole = slice_of(model, weights, 0, Layout())
    if pipeline:
        named = by_module(whole, model, 0, 1)
    else:
        named = flat(dialect_of(chunk_of(whole, model, 0, 0, old), old))
    return {name: t[:VOCAB] if name.endswith(WORDS) else t for name, t in named.items()}


def convert(source: Path, model: ModelConfig, kinds: Kinds, *, pipeline: bool) -> Path:
    """Write the universal form of a checkpoint, as DeepSpeed's converter does."""
    out = source.with_name(f"{source.name}_universal")
    (out / "zero").mkdir(parents=True)
    for path in source.glob("mp_rank_*"):
        (out / path.name).write_bytes(path.read_bytes())
    for kind, weights in kinds.items():
        for name, tensor in names_of(weights, model, pipeline=pipeline).items():
            folder = out / "zero" / name
            folder.mkdir(exist_ok=True)
            facts: dict[str, Any] = {"cat_dim": 0}
            if "dense_h_to_4h" in name and model.gated:
                facts["param_n_sub_params"] = 2
            torch.save(
                {"param": tensor.clone(), **facts}, folder / f"{'fp32' if kind == 'weight' else kind}.pt"
            )
            torch.save(STEP, folder / "step.pt")
    torch.save({"param_groups": [{"lr": 1e-3}], "clip_grad": 1.0}, out / "zero" / "optimizer_state.pt")
    (out.parent / "latest_universal").write_text(out.name)
    return out


MODELS = [
    (GPT2, Layout(2), False),
    (GPT2, Layout(2, 2), True),
    (LLAMA, Layout(1, 2, arguments=UNTIED), True),
    (LLAMA, Layout(2, 1, arguments=UNTIED), False),
]
IDS = ["gpt-t2", "gpt-t2-p2-tied", "llama-p2", "llama-t2"]


@pytest.mark.parametrize(("model", "layout", "pipeline"), MODELS, ids=IDS)
def test_masters_moments_and_steps(tmp_path, model, layout, pipeline):
    kinds = kinds_of(model)
    source = save_zero(tmp_path / "theirs", model, kinds, layout, pipeline=pipeline, facts=ADAM)
    folder = convert(source, model, kinds, pipeline=pipeline)
    assert_read(folder, tmp_path / "ours", kinds)
    with MegatronReader(folder, TRUSTED) as reader:
        assert_same(read_all(reader), kinds["weight"])


def test_the_newest_of_a_run(tmp_path):
    kinds = kinds_of(GPT2)
    source = save_zero(tmp_path, GPT2, kinds, Layout(), facts=ADAM)
    folder = convert(source, GPT2, kinds, pipeline=False)
    (tmp_path / "latest").unlink()
    assert MegatronReader(tmp_path, TRUSTED).files.folder == folder


def without(place: str) -> Callable[[Path], object]:
    return lambda folder: (folder / place).unlink()


def changed(place: str, how: Callable[[dict], object]) -> Callable[[Path], object]:
    return lambda folder: edit(folder / place, how)


LAYER = "zero/language_model.encoder.layers.1"
UP = f"{LAYER}.mlp.dense_h_to_4h.weight"
DOWN = f"{LAYER}.mlp.dense_4h_to_h.weight"


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (without("mp_rank_00_model_states.pt"), CheckpointError, "lacks rank 0|mp_rank_.* beside `zero`"),
        (without(f"{UP}/fp32.pt"), DamagedCheckpointError, "must hold fp32.pt, but does not"),
        (without(f"{UP}/exp_avg.pt"), CheckpointError, "lacks exp_avg of decoder.layers.1.mlp.linear_fc1"),
        (
            changed(f"{UP}/fp32.pt", lambda saved: saved.pop("param_n_sub_params")),
            CheckpointError,
            "dense_h_to_4h.weight as it is in a whole model, but has the ranks' one behind the other",
        ),
        (
            changed(f"{DOWN}/fp32.pt", lambda saved: saved.update(param=saved["param"].reshape(48, 10))),
            CheckpointError,
            r"linear_fc2.weight as \[\[48, 10\]\] instead of \[24, 20\]",
        ),
        (
            lambda folder: torch.save(STEP - 1, folder / DOWN / "step.pt"),
            CheckpointError,
            "must say how many updates it made, but says",
        ),
        (lambda folder: (folder / UP / "fp32.pt").write_bytes(b"no"), DamagedCheckpointError, "fp32.pt"),
    ],
    ids=["ranks", "master", "moment", "halves", "rows", "steps", "damage"],
)
def test_refusals(tmp_path, change, error, match):
    kinds = kinds_of(LLAMA)
    source = save_zero(tmp_path / "theirs", LLAMA, kinds, Layout(2, arguments=UNTIED), facts=ADAM)
    folder = convert(source, LLAMA, kinds, pipeline=False)
    change(folder)
    with pytest.raises(error, match=match):
        assert_read(folder, tmp_path / "ours", kinds)


def test_old_orders_of_queries_are_not_joined(tmp_path):
    kinds = kinds_of(GPT2)
    source = save_zero(tmp_path, GPT2, kinds, Layout(2, version=1.0), facts=ADAM)
    folder = convert(source, GPT2, kinds, pipeline=False)
    with pytest.raises(CheckpointError, match="query_key_value.* as it is in a whole model"):
        MegatronReader(folder, ImportOptions(trust_pickle=True))


def mapped(folder: Path, dp: int) -> None:
    """Add each parameter's place in a rank's vectors, which DeepSpeed's converter needs."""
    from deepspeed.utils.tensor_fragment import fragment_address

    for path in folder.glob("*optim_states.pt"):
        data, model = (int(word) for word in path.name.split("_") if word.isdecimal())
        shapes = torch.load(folder / f"mp_rank_{model:02d}_model_states.pt", weights_only=False)[
            "param_shapes"
        ]

        def add(saved: dict, shapes=shapes, data=data) -> None:
            inner, mappings = saved["optimizer_state_dict"], []
            for number, group in enumerate(shapes):
                own = inner["base_optimizer_state"]["state"][number]["exp_avg"].numel()
                at, mapping = -data * own, {}
                for name, shape in group.items():
                    start, stop = max(at, 0), min(at + shape.numel(), own)
                    if start < stop:
                        mapping[name] = fragment_address(numel=stop - start, start=start)
                    at += shape.numel()
                mappings.append(mapping)
            inner["param_slice_mappings"] = mappings

        edit(path, add)


def patterns_of(model: ModelConfig, *, pipeline: bool) -> dict[str, Any]:
    """Megatron-DeepSpeed's patterns of parameter names, by which the converter joins the ranks' slices."""
    layer = r"\d+" if pipeline else r"language_model.encoder.layers.\d+"
    norm = r"\d+" if pipeline else r"language_model.encoder.final_layernorm"
    word = "tied_modules.embed" if pipeline else "language_model.embedding"
    norms = [f"{layer}.{name}_layernorm.weight" for name in ("input", "post_attention")]
    whole = [*norms, f"{norm}.weight"]
    if model is GPT2:
        whole += [f"{word}.position_embeddings.weight", f"{norm}.bias"]
        whole += [name.replace(".weight", ".bias") for name in norms]
        whole += [f"{layer}.{name}.bias" for name in ("self_attention.dense", "mlp.dense_4h_to_h")]
    words = [f"{word}.word_embeddings.weight"]
    if model is not GPT2:
        words = [r"\d+.word_embeddings.weight", r"\d+.lm_head.weight"] if pipeline else words
        words += [] if pipeline else ["language_model.output_layer.weight"]
    rows = [f"{layer}.{name}.weight" for name in ("self_attention.dense", "mlp.dense_4h_to_h")]
    said = {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": VOCAB,
        "tp_replicated_parameter_patterns": whole,
        "parameter_with_row_parallelism_patterns": rows,
        "vocabulary_parameter_patterns": words,
    }
    if pipeline and model is GPT2:
        said["pipeline_replicated_parameter_patterns"] = [f"{word}.word_embeddings.weight"]
        said["pipeline_replicated_parameter_patterns"] += [f"{word}.position_embeddings.weight"]
    if model.gated:
        said["parameter_with_2_sub_params_cat_dim_0"] = [f"{layer}.mlp.dense_h_to_4h.weight"]
    return said


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize(("model", "layout", "pipeline"), MODELS, ids=IDS)
def test_as_deepspeed_converts(tmp_path, model, layout, pipeline):
    """DeepSpeed itself converts the ranks' files; every master and moment keeps its bits."""
    kinds, dp = kinds_of(model), 3
    source = save_zero(tmp_path / "theirs", model, kinds, layout, dp=dp, pipeline=pipeline, facts=ADAM)
    mapped(source, dp)
    for path in source.glob("mp_rank_*"):
        edit(
            path, lambda saved: saved.update(universal_checkpoint_info=patterns_of(model, pipeline=pipeline))
        )
        if not pipeline:  # the converter of 0.19 takes no nested weights, in which it looks for frozen ones
            edit(path, lambda saved: saved.update(module=flat(saved["module"])))
    out = tmp_path / "theirs" / "global_step100_universal"
    command = [sys.executable, "-W", "ignore", "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(source), "--output_folder", str(out)]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-3000:]
    written = {path.name for path in (out / "zero").iterdir() if path.is_dir()}
    assert written == names_of(kinds["weight"], model, pipeline=pipeline).keys()
    assert {path.stem for path in (out / "zero" / min(written)).iterdir()} == {"fp32", "step", *MOMENTS}
    assert_read(out, tmp_path / "ours", kinds)
