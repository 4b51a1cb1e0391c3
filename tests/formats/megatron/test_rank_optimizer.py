"""Optimizer state of folders of ranks, Megatron-LM's and DeepSpeed's: every element, and runs that go on."""

from __future__ import annotations

import gc
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.part import WEIGHT, Key
from megazero.checkpoint.reader import CheckpointReader
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError, DamagedCheckpointError
from megazero.formats.megatron import stages
from megazero.formats.megatron.arguments import arguments_of as megatron_arguments
from megazero.formats.megatron.convert import import_megatron
from megazero.formats.megatron.reader import ImportOptions, MegatronReader
from tests.formats.megatron.optimizer_samples import (
    MOMENTS,
    STEP,
    buffers,
    narrowed,
    numbered,
    place,
    save_ranks,
    save_zero,
)
from tests.formats.megatron.resumed import goes_on
from tests.formats.megatron.samples import (
    GPT2,
    LLAMA,
    VOCAB,
    Layout,
    arguments_of,
    chunk_of,
    edit,
    random_weights,
    slice_of,
)
from tests.formats.megatron.test_distributed import GOES_ON, MOE, PROGRESS, experts_of
from tests.formats.megatron.test_reader import UNTIED
from tests.layouts.layout import VOCABULARY
from tests.layouts.layout import Layout as Run

ADAM = {**PROGRESS, "consumed_train_samples": 800}
SMALL_NORMS = {"qk_layernorm": True, "apply_wd_to_qk_layernorm": True}


def kinds_of(model: ModelConfig) -> dict[str, dict[str, torch.Tensor]]:
    """Masters and moments without equal values; second moments are positive."""
    weights = random_weights(model)
    return {
        WEIGHT: weights,
        "exp_avg": {name: tensor * 0.1 + 0.01 for name, tensor in weights.items()},
        "exp_avg_sq": {name: tensor.square() for name, tensor in weights.items()},
    }


def assert_read(folder: Path, out: Path, kinds: dict[str, dict[str, torch.Tensor]]) -> CheckpointReader:
    with MegatronReader(folder, GOES_ON) as reader:
        read = CheckpointReader(import_megatron(reader, out))
    assert set(read.shapes) == {Key(n, k) for k, tensors in kinds.items() for n in tensors}
    for kind, tensors in kinds.items():
        for name, tensor in tensors.items():
            assert torch.equal(read.tensor(Key(name, kind)), tensor), (kind, name)
    assert (read.manifest.iteration, read.facts["updates"]) == (100, STEP)
    assert read.facts["state"]["consumed_samples"] == 800
    assert read.facts["state"]["skipped"] == 100 - STEP
    return read


LAYOUTS = [
    (GPT2, Layout()),
    (GPT2, Layout(2, 2)),
    (GPT2, Layout(1, 2, chunks=2, dialect="fused")),
    (GPT2, Layout(2, 1, dialect="old", version=1.0)),
    (LLAMA, Layout(2, 2, arguments=UNTIED)),
    (LLAMA.model_copy(update=SMALL_NORMS), Layout(2, 1, arguments={**UNTIED, **SMALL_NORMS})),
    (GPT2.model_copy(update=SMALL_NORMS), Layout(1, 2, arguments=SMALL_NORMS)),
]
IDS = ["gpt", "gpt-t2-p2", "gpt-p2-v2", "gpt-old", "llama-t2-p2", "llama-decayed-norms", "gpt-decayed-norms"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=IDS)
def test_of_an_optimizer_that_is_whole_on_each_rank(tmp_path, model, layout, dtype):
    kinds = kinds_of(model)
    folder = save_ranks(tmp_path / "theirs", model, kinds, layout, dtype=dtype, facts=ADAM)
    assert_read(folder, tmp_path / "ours", kinds)


@pytest.mark.parametrize("bucket", [None, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=IDS)
def test_of_an_optimizer_that_ranks_share(tmp_path, model, layout, dtype, bucket):
    kinds, tied = kinds_of(model), layout.pp > 1 and model is GPT2
    facts = {**ADAM, "ddp_bucket_size": 700, "data_parallel_size": 4}
    folder = save_ranks(
        tmp_path / "theirs",
        model,
        kinds,
        layout,
        dtype=dtype,
        distributed=True,
        bucket=bucket,
        tied_alone=tied,
        facts=facts,
    )
    assert_read(folder, tmp_path / "ours", kinds)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("model", "layout", "pipeline"),
    [
        (GPT2, Layout(2), False),
        (GPT2, Layout(2, 2), True),
        (LLAMA, Layout(1, 2, arguments=UNTIED), True),
        (LLAMA, Layout(2, 1, arguments=UNTIED), True),
    ],
    ids=["gpt", "gpt-tied", "llama-p2", "llama-t2"],
)
@pytest.mark.parametrize("dp", [1, 3])
def test_of_deepspeed(tmp_path, model, layout, pipeline, bf16, dp):
    kinds = kinds_of(model)
    folder = save_zero(
        tmp_path / "theirs", model, kinds, layout, dp=dp, bf16=bf16, pipeline=pipeline, facts=ADAM
    )
    assert_read(folder, tmp_path / "ours", kinds)


def masters_of(saved):
    return saved["optimizer"]["fp32_from_fp16_params"]


def swap_masters(saved):
    masters = masters_of(saved)[0]
    masters[-1], masters[-5] = masters[-5], masters[-1]


RANK = "mp_rank_01/model_optim_rng.pt"
SHARED = "mp_rank_01/distrib_optim.pt"


@pytest.mark.parametrize(
    ("distributed", "file", "how", "match"),
    [
        (
            False,
            RANK,
            lambda s: s.pop("optimizer"),
            "must hold the optimizer's state to go on from, but holds",
        ),
        (
            False,
            RANK,
            swap_masters,
            "an order that is known, but the master of .* is (not its weight|there twice)",
        ),
        (
            False,
            RANK,
            lambda s: s["optimizer"]["optimizer"]["param_groups"][1]["params"].pop(),
            "a group of [0-9]+ parameters is none of the model's",
        ),
        (
            False,
            RANK,
            lambda s: s["optimizer"]["optimizer"]["state"][0].pop("exp_avg_sq"),
            "two moments of each parameter .*, but lacks those of embedding.word_embeddings.weight",
        ),
        (
            False,
            RANK,
            lambda s: s["optimizer"]["fp32_from_fp16_params"][0].pop(),
            "a group has 17 masters of 18",
        ),
        (
            False,
            RANK,
            lambda s: s["optimizer"]["optimizer"]["state"][1]["exp_avg"].mul_(2),
            "alike where ranks have copies, but holds exp_avg of embedding.position_embeddings",
        ),
        (
            False,
            RANK,
            lambda s: masters_of(s).pop(),
            "an order that is known, but it has masters of 1 of 2 groups",
        ),
        (
            False,
            RANK,
            lambda s: masters_of(s).append([]),
            "an order that is known, but it has masters of 3 of 2 groups",
        ),
        (
            False,
            RANK,
            lambda s: s["optimizer"]["optimizer"]["param_groups"][0].pop("params"),
            "01/model_optim_rng.pt` must hold an optimizer's state as Megatron-LM saves it, .*: KeyError",
        ),
        (
            False,
            RANK,
            lambda s: masters_of(s)[0].__setitem__(0, None),
            "saves it, but cannot be read: AttributeError: .*; copy it again",
        ),
        (
            True,
            SHARED,
            lambda s: s[0][torch.bfloat16, torch.float32]["param"].unsqueeze_(0),
            "01/distrib_optim.pt` must hold an optimizer's state as Megatron-LM saves it, .*: RuntimeError",
        ),
        (True, SHARED, lambda s: s.pop("buckets_coalesced"), "has its buckets one by one"),
        (
            True,
            SHARED,
            lambda s: s[0][torch.bfloat16, torch.float32]["param"][:9].add_(1),
            "0 ways to lay parameters out in distrib_optim.pt give the weights",
        ),
        (True, SHARED, lambda s: s.update({1: s[0]}), "has 2 buffers of 1 kinds of weights"),
        (
            True,
            SHARED,
            lambda s: s.update({0: [1]}),
            "distrib_optim.pt has no masters of one kind of weights at 0",
        ),
        (
            False,
            RANK,
            lambda s: s["optimizer"].pop("fp32_from_fp16_params"),
            "must hold the same model chunks",
        ),
        (True, SHARED, lambda s: s[0][torch.bfloat16, torch.float32].pop("exp_avg"), "lacks those of"),
    ],
)
def test_what_is_not_known_for_certain_is_refused(tmp_path, distributed, file, how, match):
    folder = save_ranks(tmp_path, GPT2, kinds_of(GPT2), Layout(2), distributed=distributed, facts=ADAM)
    edit(folder / file, how)
    with pytest.raises(CheckpointError, match=match):
        MegatronReader(folder, GOES_ON)
    MegatronReader(folder, ImportOptions(trust_pickle=True, vocab_size=VOCAB)).close()


def test_a_shared_optimizer_without_its_file(tmp_path):
    folder = save_ranks(tmp_path, GPT2, kinds_of(GPT2), Layout(), distributed=True, facts=ADAM)
    (folder / "mp_rank_00" / "distrib_optim.pt").unlink()
    with pytest.raises(CheckpointError, match="distrib_optim.pt` must lie beside model_optim_rng.pt"):
        MegatronReader(folder, GOES_ON)


def test_stages_are_opened_twice_at_most(tmp_path, monkeypatch):
    """Once to list their tensors, and once to compare the last stage's copy of the embedding."""
    read, paths = stages.read_states, []

    def counted(path, *further):
        paths.append(path)
        return read(path, *further)

    monkeypatch.setattr(stages, "read_states", counted)
    folder = save_ranks(tmp_path, GPT2, kinds_of(GPT2), Layout(4, 2), facts=ADAM)
    MegatronReader(folder, GOES_ON).close()
    assert len(set(paths)) == 8
    assert len(paths) == 16


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.parametrize("write", ["ranks", "zero", "pipeline"])
def test_a_closed_reader_maps_no_file(tmp_path, write):
    layout = Layout(1, 2 if write == "pipeline" else 1)
    if write == "ranks":
        folder = save_ranks(tmp_path, GPT2, kinds_of(GPT2), layout, facts=ADAM)
    else:
        folder = save_zero(tmp_path, GPT2, kinds_of(GPT2), layout, pipeline=write == "pipeline", facts=ADAM)
    reader = MegatronReader(folder, GOES_ON)
    assert str(folder) in Path("/proc/self/maps").read_text()
    reader.close()
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_elastic_states_of_deepspeed(tmp_path):
    """Each group has a list of states."""
    kinds = kinds_of(GPT2)
    folder = save_zero(tmp_path / "theirs", GPT2, kinds, Layout(), dp=1, facts=ADAM)

    def listed(saved):
        own = saved["optimizer_state_dict"]
        own["base_optimizer_state"] = [[state] for state in own["base_optimizer_state"]["state"].values()]

    edit(zero_file(folder, 0), listed)
    assert_read(folder, tmp_path / "ours", kinds)


@pytest.fixture
def scaled(monkeypatch):
    """Add DeepSpeed's dynamic loss scaler, 39 steps after an overflow, to a file."""
    module = types.ModuleType("deepspeed.runtime.fp16.loss_scaler")
    module.DynamicLossScaler = type("DynamicLossScaler", (), {"__module__": module.__name__})
    for name in ("deepspeed", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)

    def give(path: Path, **further) -> None:
        scaler = module.DynamicLossScaler()
        vars(scaler).update(cur_scale=512.0, cur_iter=50, last_overflow_iter=10, cur_hysteresis=2, **further)
        edit(path, lambda saved: saved["optimizer_state_dict"].update(loss_scaler=scaler))

    return give


def test_the_loss_scale_of_deepspeed(tmp_path, scaled):
    folder = save_zero(tmp_path / "theirs", GPT2, kinds_of(GPT2), Layout(), facts=ADAM)
    scaled(zero_file(folder, 0), scale_window=15)
    with MegatronReader(folder, GOES_ON) as reader:
        read = CheckpointReader(import_megatron(reader, tmp_path / "ours"))
    left = {"hysteresis_left": 2, "overflows_at_floor": 0}
    assert read.facts["scaler"] == {"scale": 512.0, "growth_tracker": 8, **left}


@pytest.mark.parametrize(
    ("further", "why"), [({"scale_window": 0}, "ZeroDivisionError"), ({}, "KeyError: 'scale_window'")]
)
def test_a_damaged_loss_scale_of_deepspeed(tmp_path, scaled, further, why):
    folder = save_zero(tmp_path, GPT2, kinds_of(GPT2), Layout(), facts=ADAM)
    scaled(zero_file(folder, 0), **further)
    with pytest.raises(DamagedCheckpointError, match=f"as DeepSpeed saves it, but cannot be read: {why}"):
        MegatronReader(folder, GOES_ON)


def zero_file(folder: Path, data: int = 1) -> Path:
    return folder / f"zero_pp_rank_{data}_mp_rank_00_optim_states.pt"


def test_refusals_of_deepspeed(tmp_path):
    def refused(name: str, how, match: str) -> None:
        folder = save_zero(tmp_path / name, GPT2, kinds_of(GPT2), Layout(), facts=ADAM)
        how(folder)
        with pytest.raises(CheckpointError, match=match):
            MegatronReader(folder, GOES_ON)

    class Hostile:
        def __reduce__(self):
            return exec, ("raise SystemExit('ran')",)

    def swap(saved):
        groups = saved["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        groups[0] = groups[0].flip(0)

    refused(
        "gone",
        lambda f: zero_file(f).unlink(),
        r"files of \['2'\] data-parallel ranks, but has those of \[0\]",
    )
    refused(
        "all", lambda f: [zero_file(f, n).unlink() for n in (0, 1)], "must hold zero_pp_rank_.*_mp_rank_00"
    )
    refused("swapped", lambda f: edit(zero_file(f), swap), "weights that masters are more exactly")
    refused(
        "third",
        lambda f: edit(zero_file(f), lambda s: s["optimizer_state_dict"].pop("base_optimizer_state")),
        "state of ZeRO's stages 1 or 2",
    )

    def state(name: str, how, match: str) -> None:
        refused(name, lambda f: edit(zero_file(f, 0), lambda s: how(s["optimizer_state_dict"])), match)

    for number, (how, why) in enumerate(
        [
            (lambda s: s.update(base_optimizer_state=[]), "IndexError"),
            (lambda s: s.update(base_optimizer_state={}), "KeyError: 'state'"),
            (lambda s: s.update(single_partition_of_fp32_groups=None), "TypeError"),
            (lambda s: s["single_partition_of_fp32_groups"].__setitem__(0, None), "AttributeError"),
            (lambda s: s.update(param_alignment_paddings=[[0]]), "IndexError"),
        ]
    ):
        state(
            str(number), how, f"optimizer's state of rank 0 as DeepSpeed saves it, but cannot be read: {why}"
        )
    refused(
        "hostile",
        lambda f: zero_file(f).write_bytes(pickle.dumps(Hostile(), protocol=2)),
        "which was not called|must be a file of torch.save",
    )


@pytest.mark.parametrize(
    "write",
    ["numbered", "buffered", "zero", "pipeline"],
)
def test_a_run_goes_on(tmp_path, write):
    """Saved by one process, written in Megatron's forms and imported, the next losses have the same bits."""
    alone = Run(layers=4)
    goes_on(alone, tmp_path / "run")
    before = CheckpointReader(tmp_path / "run" / "iter_0000002")
    model = ModelConfig.model_validate(before.facts["config"]["model"])
    kinds = {
        kind: {key.name: before.tensor(key) for key in before.shapes if key.kind == kind}
        for kind in (WEIGHT, *MOMENTS)
    }
    facts = megatron_arguments(model, VOCABULARY, before.facts, torch.float32)
    facts |= {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    layout, theirs = Layout(2, 2), tmp_path / "theirs"
    if write in ("numbered", "buffered"):
        folder = save_ranks(
            theirs,
            model,
            kinds,
            layout,
            distributed=write == "buffered",
            tied_alone=True,
            facts=facts,
            iteration=2,
            step=2,
        )
    else:
        layout = Layout(2, 2 if write == "pipeline" else 1)
        facts["pipeline_model_parallel_size"] = layout.pp
        folder = save_zero(
            theirs, model, kinds, layout, pipeline=write == "pipeline", facts=facts, iteration=2, step=2
        )
    options = ImportOptions(trust_pickle=True, vocab_size=VOCABULARY, with_optimizer=True, arguments={})
    with MegatronReader(folder, options) as reader:
        after = CheckpointReader(import_megatron(reader, tmp_path / "back"))
    assert after.shapes.keys() <= before.shapes.keys()
    assert all(torch.equal(before.tensor(key), after.tensor(key)) for key in after.shapes)
    assert goes_on(alone, tmp_path / "back", 2) == goes_on(alone, tmp_path / "run", 2)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("grouped", ["one by one", "numbered", "together"])
def test_of_experts_on_ranks_of_their_own(tmp_path, grouped, distributed):
    """Core has one optimizer for expert-parallel weights and another one for the rest."""
    model = LLAMA.model_copy(update=MOE)
    kinds, arguments = kinds_of(model), {**UNTIED, **MOE, **ADAM, "num_experts": 4}
    layout = Layout(arguments={**arguments, "expert_model_parallel_size": 2})
    for rank in range(2):
        chunk = {}
        for kind, weights in kinds.items():
            own = chunk_of(slice_of(model, weights, 0, layout), model, 0, 0, layout)
            for number in range(4):
                own |= experts_of(weights, number, number, rank, grouped)
            chunk[kind] = {name: own[name].contiguous() for name in sorted(own, key=place)}
        apart = [
            {k: {n: t for n, t in of.items() if (".mlp.experts." in n) == expert} for k, of in chunk.items()}
            for expert in (False, True)
        ]
        folder = tmp_path / "theirs" / "iter_0000100" / f"mp_rank_00_{rank:03d}"
        folder.mkdir(parents=True)
        chained = [numbered([part], torch.bfloat16, STEP) for part in apart]
        for expert, one in enumerate(chained):
            for group in one["optimizer"]["param_groups"]:
                group["is_expert_parallel"] = bool(expert)
                if distributed:
                    del group["params"]
            if distributed:
                del one["fp32_from_fp16_params"], one["optimizer"]["state"]
        if distributed:
            parts = [buffers([part], torch.bfloat16, None, ()) for part in apart]
            torch.save(parts, folder / "distrib_optim.pt")
        saved = {"args": arguments_of(model, layout), "iteration": 100, "checkpoint_version": 3.0}
        saved |= {"model": narrowed(chunk["weight"], torch.bfloat16), "optimizer": chained}
        torch.save(saved, folder / "model_optim_rng.pt")
    assert_read(tmp_path / "theirs" / "iter_0000100", tmp_path / "ours", kinds)


def test_rounded_weights_are_no_masters(tmp_path):
    folder = save_ranks(tmp_path, GPT2, kinds_of(GPT2), Layout(), facts=ADAM)
    edit(folder / "mp_rank_00/model_optim_rng.pt", lambda s: s["optimizer"].pop("fp32_from_fp16_params"))
    with pytest.raises(
        CheckpointError,
        match="masters of all weights, but lacks weight of decoder.final_layernorm.*; copy all files, or",
    ):
        MegatronReader(folder, GOES_ON)
