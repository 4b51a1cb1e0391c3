"""Timers, profiles, monitors, layers and files by DeepSpeed's names, where the checks do not reach."""

from __future__ import annotations

import logging
import sys
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from megazero.commands import env
from megazero.config.deepspeed.load import load_ds_config
from megazero.deepspeed.comm.groups import expert_ranks
from megazero.deepspeed.legacy.indexed import MMapIndexedDatasetBuilder, make_builder, make_dataset
from megazero.deepspeed.legacy.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from megazero.deepspeed.models.linear import LoRAConfig, OptimizedLinear, init_lora
from megazero.deepspeed.reports.logging import LoggerFactory, logger
from megazero.deepspeed.reports.monitor import MonitorMaster, TensorBoardMonitor, get_monitor_config
from megazero.deepspeed.reports.profiling import FlopsProfiler, get_model_profile
from megazero.deepspeed.reports.timer import trim_mean
from megazero.errors import ConfigError
from tests.tables import over_table


def test_a_warning_is_given_once(capsys):
    for _ in range(2):
        logger.warning_once("only once")
        logger.log_dist_once("this too", ranks=[0], level=logging.WARNING)
    out = capsys.readouterr().out
    assert (out.count("only once"), out.count("this too")) == (1, 1)


def test_a_logger_needs_a_name():
    with pytest.raises(ValueError, match="`name` must be"):
        LoggerFactory.create_logger()


def test_a_mean_of_nothing_but_edges_is_refused():
    with pytest.raises(ConfigError, match="`trim_percent` must be from 0 to below 0.5"):
        trim_mean([1.0], 0.5)


def encoder(pre: bool) -> nn.TransformerEncoderLayer:
    gelu = nn.GELU(approximate="tanh")
    return nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.0, activation=gelu, layer_norm_eps=1e-12, batch_first=True, norm_first=pre
    )


@pytest.mark.parametrize("pre", [True, False])
def test_the_transformer_layer_is_an_encoder_of_torch(pre):
    torch.manual_seed(0)
    config = DeepSpeedTransformerConfig(
        hidden_size=8, intermediate_size=16, heads=2, initializer_range=0.3, num_hidden_layers=2,
        pre_layer_norm=pre, attn_dropout_ratio=0.0, hidden_dropout_ratio=0.0,
    )  # fmt: skip
    ours, theirs = DeepSpeedTransformerLayer(config), encoder(pre)
    names = {
        "self_attn.in_proj_weight": "attn_qkvw", "self_attn.in_proj_bias": "attn_qkvb",
        "self_attn.out_proj.weight": "attn_ow", "self_attn.out_proj.bias": "attn_ob",
        "linear1.weight": "inter_w", "linear1.bias": "inter_b",
        "linear2.weight": "output_w", "linear2.bias": "output_b",
    }  # fmt: skip
    first, second = ("norm_", "attn_n") if pre else ("attn_n", "norm_")
    for number, name in ((1, first), (2, second)):
        names |= {f"norm{number}.weight": f"{name}w", f"norm{number}.bias": f"{name}b"}
    with torch.no_grad():
        for theirs_name, name in names.items():
            param = theirs.get_parameter(theirs_name)
            if param.dim() == 1:
                param.normal_()
                getattr(ours, name).copy_(param)
            else:
                param.copy_(getattr(ours, name))
    x = torch.randn(2, 5, 8)
    padded = torch.tensor([[False] * 5, [False, False, False, True, True]])
    mask = torch.zeros(2, 1, 1, 5).masked_fill(padded[:, None, None], -10000.0)
    mine, expected = ours(x, mask), theirs(x, src_key_padding_mask=padded)
    torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)
    mine.square().sum().backward()
    expected.square().sum().backward()
    for theirs_name, name in names.items():
        torch.testing.assert_close(
            getattr(ours, name).grad, theirs.get_parameter(theirs_name).grad, atol=1e-4, rtol=1e-4
        )


def test_a_transformer_layer_takes_weights_and_returns_a_tuple():
    config = DeepSpeedTransformerConfig.from_dict({"hidden_size": 4, "heads": 2, "return_tuple": True})
    weights = [torch.full(shape, 0.5) for shape in [(4, 4)] * 4 + [(4,), (16, 4), (4, 16), (4,)]]
    biases = [torch.full((size,), 0.25) for size in (4, 4, 4, 4, 4, 16, 4, 4)]
    layer = DeepSpeedTransformerLayer(config, weights, biases)
    assert {float(p.detach().mean()) for p in layer.parameters()} == {0.5, 0.25}
    (output,) = layer(torch.ones(1, 3, 4), None, None, output_attentions=False)
    assert output.shape == (1, 3, 4)
    with pytest.raises(ConfigError, match="hidden states and a mask alone"):
        layer(torch.ones(1, 3, 4), None, torch.ones(1))


def test_a_transformer_layer_without_sizes_is_refused():
    with pytest.raises(ConfigError, match="`hidden_size` must be a multiple of `heads`"):
        DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(hidden_size=6, heads=4))


def test_adapters_wait_until_they_are_made():
    config = LoRAConfig(lora_r=2, delay_lora_init=True)
    model = nn.Sequential(OptimizedLinear(4, 4, lora_config=config, dtype=torch.float32), nn.Linear(4, 2))
    with pytest.raises(ConfigError, match="`init_lora` must be called"):
        model(torch.ones(1, 4))
    init_lora(model)
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    assert trained == ["0.lora_weight_1.weight", "0.lora_weight_2.weight"]
    assert model(torch.ones(1, 4)).shape == (1, 2)


@over_table(
    ("make", "says"),
    [
        (lambda: LoRAConfig(base_weight_sharding=2), "use ZeRO stage 3"),
        (lambda: OptimizedLinear(2, 2, quantization_config=object()), "`quantization_config` must be None"),
        (lambda: OptimizedLinear(2, 2, bias=True, lora_config=LoRAConfig()), "`bias` must be false"),
    ],
)
def test_layers_that_deepspeed_alone_has_are_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_report_names_modules_and_shares(capsys):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    get_model_profile(model, input_shape=(1, 4), top_modules=1)
    out = capsys.readouterr().out
    assert "fwd MACs per GPU:" in out
    assert "0 (Linear): 40 = 69% , 32 MACs = 66.7%" in out.replace("%,", "% ,")
    FlopsProfiler(model).print_model_profile()
    assert capsys.readouterr().out == ""


def test_a_mode_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="`mode` must be forward or generate"):
        get_model_profile(nn.Linear(1, 1), input_shape=(1, 1), mode="backward")


def test_comet_gets_a_value_for_so_many_samples(monkeypatch):
    class Comet(types.ModuleType):
        """The package, and an experiment of it."""

        def start(self, **asked):
            self.asked, self.logged = asked, []
            return self

        def set_name(self, name):
            self.name = name

        def log_metric(self, tag, value, step):
            self.logged.append((tag, value, step))

    comet = Comet("comet_ml")
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    section = {
        "enabled": True,
        "project": "x",
        "experiment_name": "n",
        "samples_log_interval": 8,
    }
    monitor = MonitorMaster(get_monitor_config({"comet": section}))
    assert monitor.enabled
    for samples in (4, 8, 12, 16):
        monitor.write_events([("loss", samples / 2, samples), ("lr", 0.1, samples)])
    assert comet.logged == [("loss", 2.0, 4), ("lr", 0.1, 4), ("loss", 6.0, 12), ("lr", 0.1, 12)]
    assert (comet.asked["project"], comet.asked["online"], comet.name) == ("x", None, "n")
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    with pytest.raises(ConfigError, match="`comet` must not be enabled where .*; run `pip install comet_ml`"):
        MonitorMaster(get_monitor_config({"comet": section}))


def test_scalars_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    monitor = TensorBoardMonitor(get_monitor_config({"tensorboard": section}).tensorboard)
    monitor.write_events([("Train/loss", 1.0, 3)])
    monitor.summary_writer.close()
    assert len(list((tmp_path / "job").iterdir())) == 1


def test_a_script_that_repeats_steps_leaves_one_value_for_each(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = get_monitor_config({"tensorboard": section, "csv_monitor": section})
    for steps, value in ((range(1, 5), 1.0), (range(3, 5), 2.0)):  # the second job resumes the first, after 2
        monitor = MonitorMaster(config)
        for step in (*steps, steps[-1]):
            monitor.write_events([("Train/loss", value, step), ("Train/Samples/loss", value, 8 * step)])
        monitor.tb_monitor.summary_writer.close()
    events = loader.EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    rows = [line.split(",") for line in (tmp_path / "job" / "Train_loss.csv").read_text().splitlines()]
    once = [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert [(event.step, event.value) for event in events.Scalars("Train/loss")] == once
    assert [(event.step // 8, event.value) for event in events.Scalars("Train/Samples/loss")] == once
    assert (rows[0], [(int(at), float(value)) for at, value in rows[1:]]) == (["step", "loss"], once)


def test_datasets_of_other_kinds_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="`impl` must be mmap, but is lazy"):
        make_dataset("x", "lazy")
    builder = make_builder(str(tmp_path / "a.bin"), "mmap")
    builder.add_item_numpy(np.array([1, 2]))
    with pytest.raises(ConfigError, match="`end_document` must be called before"):
        builder.merge_file_("x")
    with pytest.raises(ConfigError, match="`index_file` must be"):
        builder.finalize(str(tmp_path / "b.idx"))
    builder.finalize(str(tmp_path / "a.idx"))
    second = MMapIndexedDatasetBuilder(str(tmp_path / "c.bin"), np.int32)
    second.merge_file_(str(tmp_path / "a"))
    second.finalize(str(tmp_path / "c.idx"))
    assert make_dataset(str(tmp_path / "c"), "infer")[0].tolist() == [1, 2]


@over_table("config", ["none.json", "W10=", 3])
def test_a_json_that_is_none_is_refused(config):
    with pytest.raises(ConfigError, match="must (name a readable file|be a path)"):
        load_ds_config(config)


@dataclass(frozen=True)
class Machine:
    """What is known of a machine, as far as the command looks at it."""

    variables: dict[str, str]


def test_the_report_of_the_machine_needs_no_arguments(monkeypatch, capsys):
    monkeypatch.setattr(env, "gather", lambda ranks: Machine({"HOME": "/root"}))
    monkeypatch.setattr(env, "find_problems", lambda found: ())
    monkeypatch.setattr(env, "report", lambda found: "the machine")
    assert env.main() == 0
    assert capsys.readouterr().out == "the machine\n"


def test_groups_of_experts_are_listed_by_slice_of_the_layers():
    shared, same = expert_ranks(16, 2, 4)
    assert shared == [[0, 2, 4, 6], [8, 10, 12, 14], [1, 3, 5, 7], [9, 11, 13, 15]]
    assert same == [[0, 8], [2, 10], [4, 12], [6, 14], [1, 9], [3, 11], [5, 13], [7, 15]]
