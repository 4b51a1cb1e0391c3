"""Every row of the tables of names leads somewhere, and a refused name says what to do."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from megazero.deepspeed.surface import Name, Surface, SurfaceModule, read_names
from megazero.errors import ConfigError
from tests.source_tree import ROOT
from tests.tables import over_table

ROWS = read_names()


def test_every_name_is_here():
    for row in ROWS:
        assert row.value() is not None or row.name == "dist", row


def test_a_place_has_one_row_for_a_name():
    places = Counter((module, row.name) for row in ROWS for module in row.modules)
    assert [place for place, rows in places.items() if rows > 1] == []


def test_a_refused_name_can_be_imported_and_says_what_to_do_when_it_is_called():
    refused = [row for row in ROWS if row.state == "refused"]
    assert len(refused) > 30
    for row in refused:
        value = row.value()
        for call in (value, value.method, type("Derived", (value,), {})):
            with pytest.raises(ConfigError, match="must not be used here; ") as error:
                call(1, key=2)
            assert row.note in str(error.value), row
        assert not hasattr(value, "__wrapped__"), row


def test_a_row_without_a_note_must_be_the_same():
    assert [row for row in ROWS if row.state != "same" and not row.note] == []


@pytest.mark.parametrize(
    ("state", "note", "home"), [("differs", "", "a:b"), ("other", "x", "a:b"), ("same", "", "")]
)
def test_a_row_that_says_too_little_is_refused(tmp_path, state, note, home):
    (tmp_path / "x.csv").write_text(f"modules,name,home,state,note\n.,thing,{home},{state},{note}\n")
    with pytest.raises(ValueError, match="thing"):
        read_names(tmp_path)


def test_a_module_of_the_table_has_its_names_and_those_below():
    row = Name(("utils.groups",), "first", "megazero.deepspeed.comm.groups:DATA", "same", "")
    surface = Surface([row, replace(row, modules=(".",), name="top")])
    module = surface.create_module(surface.find_spec("deepspeed"))
    assert isinstance(module, SurfaceModule)
    assert dir(module) == ["top", "utils"]
    with pytest.raises(AttributeError, match="megazero knows no such name of DeepSpeed"):
        _ = module.missing


def test_scripts_import_names_from_where_deepspeed_has_them():
    code = """
import megazero.deepspeed.surface as surface
surface.install()
import deepspeed, deepspeed.comm as dist
from deepspeed import comm, get_accelerator
from deepspeed.accelerator import get_accelerator as again
from deepspeed.comm import all_reduce
from deepspeed.comm.comm import all_reduce as same
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.ops.transformer import DeepSpeedTransformerLayer
from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from deepspeed.runtime.utils import see_memory_usage
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import RepeatingLoader, groups, log_dist, logger
from deepspeed.utils.timer import SynchronizedWallClockTimer
assert all_reduce is same is deepspeed.dist.all_reduce
assert CPUAdamBuilder().is_compatible() and not deepspeed.ops.op_builder.GDSBuilder().is_compatible()
assert get_accelerator() is again()
print(deepspeed.__version__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "0.19.8\n", done.stderr


SIGNATURES = {
    "comm.all_reduce": "tensor, op, group, async_op, prof, log_name, debug",
    "comm.broadcast": "tensor, src, group, async_op, prof, log_name, debug",
    "comm.all_gather_into_tensor": "output_tensor, tensor, group, async_op, prof, log_name, debug",
    "comm.reduce_scatter_tensor": "output_tensor, tensor, op, group, async_op, prof, log_name, debug",
    "comm.all_to_all_single": "output, tensor, output_split_sizes, input_split_sizes, group, async_op, prof, "
    "log_name, debug",
    "comm.configure": "deepspeed_config, enabled, prof_all, prof_ops, verbose, debug",
    "comm.log_summary": "show_straggler, return_dict",
    "init_distributed": "dist_backend, auto_mpi_discovery, distributed_port, verbose, timeout, init_method, "
    "dist_init_required, config, rank, world_size",
    "profiling.flops_profiler.get_model_profile": "model, input_shape, args, kwargs, print_profile, "
    "detailed, module_depth, top_modules, warm_up, as_string, output_file, ignore_modules, mode",
    "sequence.layer.DistributedAttention": "local_attention, sequence_process_group, scatter_idx, "
    "gather_idx, sp_stream, num_kv_heads",
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter": "dl, sp_rank, sp_group, "
    "sp_world_size, device",
    "runtime.utils.see_memory_usage": "message, force",
    "utils.log_dist": "message, ranks, level",
    "utils.timer.ThroughputTimer": "config, batch_size, start_step, steps_per_output, monitor_memory, "
    "logging_fn",
    "runtime.utils.clip_grad_norm_": "parameters, max_norm, norm_type, mpu",
    "OnDevice": "dtype, device, enabled",
}


@over_table("path", SIGNATURES)
def test_arguments_have_deepspeeds_names_and_order(path):
    module, _, name = path.rpartition(".")
    (row,) = (row for row in ROWS if row.name == name and (module or ".") in row.modules)
    assert ", ".join(inspect.signature(row.value()).parameters) == SIGNATURES[path]


def test_models_of_transformers_are_registered_with_deepspeeds_arguments():
    ulysses = importlib.import_module("megazero.deepspeed.sequence.hugging_face").UlyssesSPAttentionHF
    assert ", ".join(inspect.signature(ulysses.register_with_transformers).parameters) == (
        "model_name_or_path, core_attn_implementation, sequence_parallel_size, micro_batch_size, seq_length, "
        "seq_length_is_variable, disable_in_eval, max_length"
    )


def test_homes_are_modules_of_megazero():
    for row in ROWS:
        if row.home and not row.home.startswith("="):
            module = importlib.import_module(row.home.partition(":")[0])
            assert module.__name__.split(".")[0] in ("megazero", "typing"), row


def test_examples_of_the_page_run():
    page = (ROOT / "docs/deepspeed/surface.md").read_text()
    examples = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, "docs/deepspeed/surface.md", "exec"), {})
