"""Distributed checkpoints of Megatron-Core: read, written, and a run that goes on from them.

What Core writes is made here by torch's own writer, as Core uses it, from names and shapes alone.
"""

from __future__ import annotations

import json
import pickle
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.part import RANDOM, WEIGHT, Key
from megazero.checkpoint.reader import CheckpointReader
from megazero.commands.checkpoint import main
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.errors import CheckpointError
from megazero.formats.megatron.arguments import arguments_of as megatron_arguments
from megazero.formats.megatron.arguments import optimizer_of
from megazero.formats.megatron.convert import import_megatron
from megazero.formats.megatron.dist_stages import DistStages
from megazero.formats.megatron.export import ExportOptions, export_megatron
from megazero.formats.megatron.folder import find_files
from megazero.formats.megatron.reader import ImportOptions, MegatronReader
from megazero.mpu.context import thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.state import TrainState
from megazero.verify.record import verification_engine
from tests.formats.megatron.resumed import goes_on
from tests.formats.megatron.samples import (
    LLAMA,
    VOCAB,
    Layout,
    arguments_of,
    random_weights,
    save_megatron,
    slice_of,
)
from tests.formats.megatron.test_reader import UNTIED, assert_same, read_all
from tests.layouts.layout import VOCABULARY
from tests.layouts.layout import Layout as Run
from tests.tables import over_table

PROGRESS = {"consumed_train_samples": 800, "global_batch_size": 8, "micro_batch_size": 2, "lr": 1e-3}
PROGRESS |= {"min_lr": 0.0, "seed": 5, "optimizer": "adam", "train_iters": 200}
GOES_ON = ImportOptions(trust_pickle=True, vocab_size=VOCAB, with_optimizer=True)
MOE = {
    "num_experts": (4,),
    "moe_ffn_hidden_size": 12,
    "moe_shared_expert_intermediate_size": 8,
    "moe_shared_expert_gate": True,
}


def save_by_torch(state: dict, folder: Path) -> None:
    """Write a distributed checkpoint with torch."""
    import torch.distributed.checkpoint as dcp  # takes seconds, and few tests need it

    dcp.save(state, checkpoint_id=folder, no_dist=True)


def stacked(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of equal layers stacked, and norms by Core's distributed names."""
    out, layers = {}, {}
    for name, tensor in weights.items():
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        if name.startswith("decoder.layers."):
            number, rest = name.removeprefix("decoder.layers.").split(".", 1)
            layers.setdefault(f"decoder.layers.{rest}", {})[int(number)] = tensor
        else:
            out[name] = tensor
    return out | {name: torch.stack([of[n] for n in sorted(of)]) for name, of in layers.items()}


def flattened(tensor: torch.Tensor, cuts: tuple[int, ...]) -> torch.Tensor:
    """A tensor as Core stored optimizer state before version 0.14: [*cuts, elements of a part]."""
    out = torch.empty(*cuts, tensor.numel() // torch.Size(cuts).numel())
    for at in torch.cartesian_prod(*map(torch.arange, cuts)).view(-1, len(cuts)).tolist():
        own = tensor
        for dim, (place, cut) in enumerate(zip(at, cuts, strict=True)):
            own = own.chunk(cut, dim)[place]
        out[tuple(at)] = own.reshape(-1)
    return out


def save_distributed(run: Path, state: dict[str, torch.Tensor], arguments: dict, optimizer: object) -> Path:
    folder = run / "iter_0000100"
    folder.mkdir(parents=True)
    save_by_torch(dict(state), folder)
    common = {"args": Namespace(**arguments), "iteration": 100, "checkpoint_version": 3.0}
    torch.save({**common, "optimizer": optimizer}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (run / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def foreign(run: Path, *, cut: bool = False) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    """Write a checkpoint; return it and its tensors by our kinds. `cut` flattens the optimizer's state."""
    kinds = {kind: random_weights(LLAMA) for kind in (WEIGHT, "exp_avg", "exp_avg_sq")}
    kinds = {k: {n: t + number for n, t in ts.items()} for number, (k, ts) in enumerate(kinds.items())}
    layout = Layout(arguments=UNTIED)
    state = {n: t.bfloat16() for n, t in stacked(slice_of(LLAMA, kinds[WEIGHT], 0, layout)).items()}
    for kind, name in zip(kinds, ("fp32_param", "exp_avg", "exp_avg_sq"), strict=True):
        for key, tensor in stacked(slice_of(LLAMA, kinds[kind], 0, layout)).items():
            layers = (4,) if key.startswith("decoder.layers.") else ()
            cuts = (*layers, *(2 if n % 2 == 0 else 1 for n in tensor.shape[len(layers) :]))
            state[f"optimizer.state.{name}.{key}"] = flattened(tensor, cuts) if cut else tensor
    optimizer = {"optimizer": {"param_groups": [{"step": 97}]}, "grad_scaler": {"scale": torch.tensor([4.0])}}
    arguments = {**vars(arguments_of(LLAMA, layout)), **PROGRESS}
    return save_distributed(run, state, arguments, optimizer), kinds


@pytest.mark.parametrize("cut", [False, True])
def test_masters_moments_and_progress(tmp_path, cut):
    folder, kinds = foreign(tmp_path / "theirs", cut=cut)
    with MegatronReader(folder, GOES_ON) as reader:
        read = CheckpointReader(import_megatron(reader, tmp_path / "ours"))
    assert read.manifest.iteration == 100
    assert set(read.shapes) == {Key(n, k) for k, tensors in kinds.items() for n in tensors}
    for kind, tensors in kinds.items():
        for name, tensor in tensors.items():
            assert torch.equal(read.tensor(Key(name, kind)), tensor), (kind, name)
    facts = read.facts
    assert (facts["updates"], facts["scaler"]["scale"], facts["stream_seed"]) == (97, 4.0, 5)
    assert facts["state"] == {
        "iteration": 100,
        "consumed_samples": 800,
        "consumed_tokens": 800 * LLAMA.seq_length,
        "skipped": 3,
        "not_updated": {"iteration": 3, "samples": 24, "tokens": 0},
    }


def test_weights_alone_are_those_in_use(tmp_path):
    folder, kinds = foreign(tmp_path)
    reader = MegatronReader(folder, ImportOptions(trust_pickle=True, vocab_size=VOCAB))
    assert_same(read_all(reader), {n: t.bfloat16().float() for n, t in kinds[WEIGHT].items()})


def change(folder: Path, **facts: object) -> None:
    common = torch.load(folder / "common.pt", weights_only=False)
    common["args"].__dict__.update(facts)
    torch.save(common, folder / "common.pt")


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda f: (f / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "but is in 'zarr'"),
        (lambda f: (f / "metadata.json").unlink(), "must say how Megatron's checkpoint is stored"),
        (lambda f: (f / "common.pt").unlink(), "common.pt"),
        (lambda f: change(f, consumed_train_samples=None), "`consumed_train_samples` and the iteration"),
        (lambda f: change(f, global_batch_size=None), "`global_batch_size` must be given"),
        (lambda f: change(f, optimizer="sgd"), "`optimizer` must be 'adam'"),
        (lambda f: change(f, lr="fast"), "`lr`"),
        (lambda f: (f / ".metadata").write_bytes(b"no pickle"), "as torch.distributed.checkpoint wrote it"),
        (lambda f: (f / "__0_0.distcp").write_bytes(bytes(100)), "must hold a tensor"),
        (lambda f: change(f, num_layers=3), "holds decoder.layers.3"),
        (lambda f: (f / "__0_0.distcp").unlink(), "on, but has 0 bytes; copy it again"),
    ],
)
def test_refusals(tmp_path, spoil, match):
    folder, _ = foreign(tmp_path / "theirs")
    spoil(folder)
    with pytest.raises(CheckpointError, match=match), MegatronReader(folder, GOES_ON) as reader:
        import_megatron(reader, tmp_path / "ours")
    assert not list((tmp_path / "ours").glob("iter_*"))


@pytest.mark.parametrize(
    ("rename", "match"),
    [
        (lambda n: n.replace("state.exp_avg_sq.", "state.momentum_buffer."), "has momentum_buffer"),
        (lambda n: n.replace("optimizer.state.exp_avg_sq.", "other."), "other"),
        (
            lambda n: n.replace("optimizer.state.", "optimizer.distributed.dp_group_idx_0."),
            "lacks exp_avg of",
        ),
    ],
)
def test_state_of_other_optimizers_is_refused(tmp_path, rename, match):
    state = stacked(slice_of(LLAMA, random_weights(LLAMA), 0, Layout()))
    state |= {
        f"optimizer.state.{kind}.{n}": t for kind in ("exp_avg", "exp_avg_sq") for n, t in state.items()
    }
    arguments = {**vars(arguments_of(LLAMA, Layout(arguments=UNTIED))), **PROGRESS}
    save_distributed(tmp_path, {rename(n): t for n, t in state.items()}, arguments, {"step": 3})
    with pytest.raises(CheckpointError, match=match):
        MegatronReader(tmp_path, GOES_ON)


@pytest.mark.parametrize("legacy", [False, True])
def test_flattened_state_of_transposed_experts_is_not_taken_for_that_of_others(tmp_path, legacy):
    name = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    weight = torch.arange(48.0).view(2, 2, 4, 3)
    state = {name: weight, f"optimizer.state.exp_avg.{name}": flattened(weight, (2, 2, 2, 1))}
    arguments = {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": legacy}
    stages = DistStages(find_files(save_distributed(tmp_path, state, arguments, None)))
    assert ("exp_avg" in stages.inventories) != legacy
    if not legacy:
        (tensors,) = stages.chunks(0)["model"]
        one = "exp_avg/decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"
        assert torch.equal(tensors[one], weight[1, 0])


class Hostile:
    def __reduce__(self):
        return exec, ("raise SystemExit('ran')",)


def test_a_hostile_description_runs_nothing(tmp_path):
    folder, _ = foreign(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointError, match=r"builtins\.exec, which was not called"):
        MegatronReader(folder, GOES_ON)


@pytest.mark.parametrize("grouped", ["one by one", "numbered", "together"])
@pytest.mark.parametrize("pp", [1, 2])
def test_experts_of_a_folder_of_ranks(tmp_path, grouped, pp):
    """Two expert-parallel ranks without a pipeline, whose folders look like those of stages."""
    model = LLAMA.model_copy(update=MOE)
    weights, layout = random_weights(model), Layout(1, pp, arguments={**UNTIED, **MOE, "num_experts": 4})
    layout.arguments["expert_model_parallel_size"] = 2
    save_megatron(tmp_path, model, weights, layout)
    for stage in range(pp):
        old = tmp_path / "iter_0000100" / (f"mp_rank_00_{stage:03d}" if pp > 1 else "mp_rank_00")
        saved = torch.load(old / "model_optim_rng.pt", weights_only=False)
        for rank in range(2):
            for i in range(4 // pp):
                saved["model"] |= experts_of(weights, stage * (4 // pp) + i, i, rank, grouped)
            new = old.with_name(old.name + f"_{rank:03d}")
            new.mkdir()
            torch.save(saved, new / "model_optim_rng.pt")
        (old / "model_optim_rng.pt").unlink()
        old.rmdir()
    reader = MegatronReader(tmp_path, ImportOptions(trust_pickle=True, vocab_size=VOCAB))
    assert_same(read_all(reader), weights)
    assert reader.model.num_experts == (4,)


def experts_of(weights, layer, number, rank, grouped):
    ours, core = f"layers.{layer}.mlp", f"decoder.layers.{number}.mlp"
    out = {
        f"decoder.layers.{number}.self_attention.linear_proj.weight": weights[
            f"layers.{layer}.attention.out.weight"
        ],
        f"{core}.router.weight": weights[f"{ours}.router.weight"],
        f"{core}.shared_experts.linear_fc1.weight": weights[f"{ours}.shared.up.weight"].flatten(0, 1),
        f"{core}.shared_experts.linear_fc2.weight": weights[f"{ours}.shared.down.weight"],
        f"{core}.shared_experts.gate_weight": weights[f"{ours}.shared_gate.weight"],
    }
    up = weights[f"{ours}.experts.up.weight"][2 * rank : 2 * rank + 2].flatten(1, 2)
    down = weights[f"{ours}.experts.down.weight"][2 * rank : 2 * rank + 2]
    if grouped == "together":
        out[f"{core}.experts.weight1"] = up.transpose(1, 2).reshape(up.shape[2], -1)
        out[f"{core}.experts.weight2"] = down.transpose(1, 2).reshape(-1, down.shape[1])
    for x in range(2) if grouped != "together" else ():
        for name, tensor in (("linear_fc1", up[x]), ("linear_fc2", down[x])):
            one = f"local_experts.{x}.{name}.weight" if grouped == "one by one" else f"{name}.weight{x}"
            out[f"{core}.experts.{one}"] = tensor
    return out


LAYOUTS = [
    (Run(layers=4), Run(tp=2, pp=2, dp=2, zero=2, layers=4)),
    (Run(shape="llama", experts="biased"), Run(tp=2, dp=2, ep=2, zero=1, shape="llama", experts="biased")),
    (Run(shape="bert"), Run(pp=2, dp=2, zero=3, shape="bert")),
    (Run(shape="deepseek"), Run(tp=2, pp=2, dp=2, zero=1, shape="deepseek")),
    (Run(shape="deepseek", experts="biased"), Run(tp=2, shape="deepseek", experts="biased")),
    (Run(shape="deepseek-lite"), Run(tp=2, dp=2, zero=2, shape="deepseek-lite")),
]


@pytest.mark.parametrize(("alone", "layout"), LAYOUTS, ids=lambda layout: layout.name)
def test_a_run_goes_on_from_what_was_exported(tmp_path, alone, layout):
    """Saved by one process, exported and imported, every tensor keeps its bits, and any layout resumes."""
    config = alone.config()
    goes_on(alone, tmp_path / "run")
    before = CheckpointReader(tmp_path / "run" / "iter_0000002")
    exported = export_megatron(before, tmp_path / "theirs", ExportOptions(with_optimizer=True))
    options = ImportOptions(trust_pickle=True, vocab_size=VOCABULARY, with_optimizer=True)
    with MegatronReader(exported.folder, options) as reader:
        after = CheckpointReader(import_megatron(reader, tmp_path / "back"))
    left_out = {str(key) for key in before.shapes.keys() - after.shapes.keys()}
    assert all(name.endswith((f"/{RANDOM}", ".load/router")) for name in left_out)
    assert after.shapes.keys() <= before.shapes.keys()
    assert all(torch.equal(before.tensor(key), after.tensor(key)) for key in after.shapes)
    assert config.model.num_layers == reader.model.num_layers
    (straight,) = goes_on(alone, tmp_path / "run", 2)
    (again,) = goes_on(alone, tmp_path / "back", 2)
    assert straight == again
    for losses in goes_on(layout, tmp_path / "back", 2):
        assert losses == pytest.approx(straight, rel=1e-5)


@over_table(
    ("settings", "match"),
    [
        ({**MOE, "num_experts": (2, 4, 4, 4)}, "different numbers of experts"),
        ({**MOE, "mlp_type": "residual", "moe_shared_expert_intermediate_size": None}, "an MLP beside them"),
        (
            {"activation": "gelu", "add_bias_linear": False},
            "but activation is gelu, which this export does not",
        ),
        ({"glu_linear_offset": 1.0}, "but glu_linear_offset is 1.0, which this export does not write"),
        ({"qk_layernorm": True, "qk_layernorm_scope": "projection"}, "but qk_layernorm_scope is projection"),
        ({"norm_position": "both"}, "but norm_position is both, which this export does not write"),
    ],
    ids=str,
)
def test_models_that_megatron_has_not_are_not_written(settings, match):
    model = LLAMA.model_copy(update=settings)
    with pytest.raises(CheckpointError, match=match):
        megatron_arguments(model, VOCAB, {}, torch.float32)


@pytest.mark.parametrize(
    "settings",
    [
        {"apply_layernorm_1p": True, "softmax_scale": 0.2},
        {"qk_layernorm": True, "apply_wd_to_qk_layernorm": True},
        {"activation": "quick_geglu", "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0},
        {"activation": "quick_geglu"},
    ],
    ids=str,
)
def test_variants_of_layers_are_written_by_megatrons_names(tmp_path, settings):
    model = LLAMA.model_copy(update=settings)
    written = megatron_arguments(model, VOCAB, {}, torch.float32)
    expected = {name: value for name, value in settings.items() if name != "activation"}
    assert {name: written[name] for name in expected} == expected
    assert (written["swiglu"], written["quick_geglu"]) == (
        "activation" not in settings,
        "activation" in settings,
    )
    weights, options = random_weights(model), ImportOptions(trust_pickle=True, vocab_size=VOCAB)
    said = {**UNTIED, **expected, "quick_geglu": "activation" in settings}
    save_megatron(tmp_path / "theirs", model, weights, Layout(arguments=said))
    with MegatronReader(tmp_path / "theirs", options) as reader:
        ours = CheckpointReader(import_megatron(reader, tmp_path / "ours"))
    export_megatron(ours, tmp_path / "back", ExportOptions())
    with MegatronReader(tmp_path / "back", options) as again:
        assert_same(read_all(again), weights)
        assert again.model == model


def test_rows_of_a_padded_vocabulary_are_those_asked_for():
    model = LLAMA.model_copy(update={"pad_vocab_size_to": 120})
    assert megatron_arguments(model, VOCAB, {}, torch.float32)["padded_vocab_size"] == 120
    assert megatron_arguments(LLAMA, VOCAB, {}, torch.float32)["padded_vocab_size"] == 112


def test_state_of_another_optimizer_is_not_written():
    facts = {"config": {"optimizer": {"optimizer": "lamb"}}, "updates": 3, "scaler": {"scale": 1.0}}
    with pytest.raises(CheckpointError, match="run of Adam .* but is of 'lamb'; export with --weights-only"):
        optimizer_of(facts)
    with pytest.raises(CheckpointError, match="but is of 'none'"):
        optimizer_of({"kind": "converted"})


ADAM = {
    **{"optimizer": "adam", "lr": 1e-3, "min_lr": 1e-4, "weight_decay": 0.1},
    **{"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8},
}
SCALER = {"scale": 1.0, "growth_tracker": 0, "hysteresis_left": 2}


@pytest.mark.parametrize(
    ("decoupled", "rates"),
    [
        ({}, [(1e-3, 1e-4, False)] * 2),
        ({"decoupled_lr": 1e-5}, [*[(1e-3, 1e-4, False)] * 2, (1e-5, 1e-4, True)]),
        (
            {"decoupled_lr": 1e-5, "decoupled_min_lr": 0.0},
            [*[(1e-3, 1e-4, False)] * 2, (1e-5, 0.0, True)],
        ),
    ],
    ids=str,
)
def test_the_embedding_s_own_rate_has_a_group(decoupled, rates):
    """Once every group had the common `max_lr`, also that of embedding and head."""
    facts = {"config": {"optimizer": {**ADAM, **decoupled}}, "updates": 3, "scaler": SCALER}
    groups = optimizer_of(facts)["optimizer"]["param_groups"]
    assert [(group["max_lr"], group["min_lr"], group["is_decoupled_lr"]) for group in groups] == rates
    assert [group["wd_mult"] for group in groups] == [1.0, 0.0, 1.0][: len(rates)]


def test_a_floor_alone_is_not_written():
    facts = {
        "config": {"optimizer": {**ADAM, "decoupled_min_lr": 1e-5}},
        "updates": 3,
        "scaler": SCALER,
    }
    with pytest.raises(
        CheckpointError, match="`decoupled_min_lr` must come with .* but is 1e-05; export with"
    ):
        optimizer_of(facts)


def test_weights_of_another_type_and_without_an_optimizer(tmp_path, capsys):
    """bf16 weights have masters beside them; weights that overflow the dtype are refused."""
    run = Run(layers=1)
    config, context = run.config(), thread_context(ThreadWorld(1), run.grid, 0)
    plan = training_plan_of(config, 1)
    section = CheckpointConfig(save=str(tmp_path / "run"))
    own = config.model_copy(update={"checkpoint": section})
    engine = verification_engine(own, plan, context)
    snapshots = Snapshots(own, plan, engine, context, VOCABULARY, 1)
    snapshots.save(TrainState())
    snapshots.saver.close()
    with CheckpointReader(tmp_path / "run" / "iter_0000000") as ours:
        half = export_megatron(ours, tmp_path / "half", ExportOptions(torch.bfloat16, with_optimizer=False))
        with pytest.raises(CheckpointError, match="must not exist yet"):
            export_megatron(ours, tmp_path / "half", ExportOptions())
        with pytest.raises(CheckpointError, match="must be written, but cannot be: .* too long"):
            export_megatron(ours, tmp_path / ("x" * 300), ExportOptions())
        expected = {key.name: ours.tensor(key) for key in ours.shapes if key.kind == WEIGHT}
    command = ["convert", str(tmp_path / "run"), str(tmp_path / "small"), "--format", "torch_dist"]
    assert main([*command, "--weights-only", "--max-shard-size", "2KB", "--dtype", "bf16"]) == 0
    assert len(list((tmp_path / "small" / "iter_0000000").glob("__0_*.distcp"))) > 5
    assert main([*command[:2], str(tmp_path / "whole"), *command[3:]]) == 0
    words = ["import-megatron", "--trust-pickle", "--with-optimizer", "--vocab-size", str(VOCABULARY)]
    assert main([*words, str(tmp_path / "whole"), str(tmp_path / "back")]) == 0
    assert f"train on with `pretrain_gpt.py --load {tmp_path / 'back'}`" in capsys.readouterr().out
    options = ImportOptions(trust_pickle=True, vocab_size=VOCABULARY)
    assert read_all(MegatronReader(tmp_path / "small", options)).keys() == expected.keys()
    assert_same(
        read_all(MegatronReader(half.folder, options)), {n: t.bfloat16().float() for n, t in expected.items()}
    )
    with pytest.raises(CheckpointError, match="two moments .* but lacks"):
        MegatronReader(half.folder, ImportOptions(True, VOCABULARY, with_optimizer=True))
    assert sorted(path.name for path in (tmp_path / "half").iterdir()) == [
        "iter_0000000",
        "latest_checkpointed_iteration.txt",
    ]
