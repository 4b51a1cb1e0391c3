"""What a distributed checkpoint's `.metadata` says, against what its files hold."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazero.checkpoint.box import Box
from megazero.errors import CheckpointError, DamagedCheckpointError
from megazero.formats.megatron.dist_file import read_array, read_metadata
from megazero.formats.megatron.reader import MegatronReader
from tests.formats.megatron.test_distributed import GOES_ON, foreign, save_by_torch
from tests.tables import over_table


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        ("exp_avg.decoder.final_layernorm.weight", (23,), "exp_avg of decoder.final_layernorm.weight otherw"),
        ("exp_avg.decoder.final_layernorm.weight", (5, 5), "exp_avg of decoder.final_layernorm.weight other"),
        (
            "exp_avg_sq.decoder.layers.mlp.linear_fc2.weight",
            (3, 24, 20),
            "exp_avg_sq of decoder.layers.0.mlp.linear_fc2.weight otherwise",
        ),
        (
            "fp32_param.decoder.layers.mlp.linear_fc2.weight",
            (24, 20),
            "weight of decoder.layers.0.mlp.linear_fc2.weight otherwise",
        ),
    ],
)
def test_state_of_another_shape_is_refused(tmp_path, name, shape, match):
    """For layers that it lacked, uninitialized memory was once returned."""
    folder, _ = foreign(tmp_path / "theirs")
    state = saved_tensors(folder)
    state[f"optimizer.state.{name}"] = torch.ones(shape)
    save_by_torch(state, folder)
    with pytest.raises(CheckpointError, match=match):
        MegatronReader(folder, GOES_ON)


def test_moments_of_integers_are_refused(tmp_path):
    folder, _ = foreign(tmp_path / "theirs")
    name = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    save_by_torch({**saved_tensors(folder), name: torch.ones(24, dtype=torch.int32)}, folder)
    with pytest.raises(CheckpointError, match="must hold masters and moments as floats in the shapes of"):
        MegatronReader(folder, GOES_ON)


@pytest.mark.parametrize("shape", [(), (10**9, 0)], ids=str)
def test_a_stack_without_layers_is_refused(tmp_path, shape):
    folder, _ = foreign(tmp_path / "theirs")
    state = {**saved_tensors(folder), "decoder.layers.mlp.linear_fc2.weight": torch.ones(shape)}
    save_by_torch(state, folder)
    with pytest.raises(CheckpointError, match=r"but holds decoder\.layers\.mlp\.linear_fc2\.weight"):
        MegatronReader(folder, GOES_ON)


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    arrays = read_metadata(folder)
    return {name: read_array(folder, array, Box.whole(array.shape)) for name, array in arrays.items()}


def forge(folder: Path, spoil: Callable[[Any], object]) -> None:
    """Change the final norm's place and record in `.metadata`."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    name = "decoder.final_layernorm.weight"
    place = next(value for key, value in metadata.storage_data.items() if key.fqn == name)
    spoil(SimpleNamespace(place=place, record=metadata.state_dict_metadata[name]))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@over_table(
    ("spoil", "match"),
    [
        (
            lambda of: setattr(of.place, "offset", 10**12),
            "must hold a tensor .24. of decoder.final_layernorm",
        ),
        (lambda of: setattr(of.place, "offset", -1), "bytes from -1 on, but has"),
        (lambda of: setattr(of.place, "length", 10**12), "in 1000000000000 bytes from"),
        (lambda of: setattr(of.place, "length", 40), "in 40 bytes from"),
        (lambda of: setattr(of.place, "length", -5), "in -5 bytes from"),
        (lambda of: setattr(of.place, "relative_path", "other.distcp"), "on, but has 0 bytes"),
        (lambda of: setattr(of.record, "size", torch.Size([1] * 17)), "a tensor has 17 dims"),
        (lambda of: setattr(of.record.properties, "dtype", "float"), "a dtype is 'float'"),
    ],
)
def test_a_description_of_more_than_the_files_hold_is_refused(tmp_path, spoil, match):
    folder, _ = foreign(tmp_path)
    forge(folder, spoil)
    with pytest.raises(DamagedCheckpointError, match=match):
        MegatronReader(folder, GOES_ON)


@over_table("dtype", [torch.float16, torch.int16, torch.float32], ids=str)
def test_a_description_of_another_dtype_is_refused(tmp_path, dtype):
    """Values were once rounded to the dtype in `.metadata`."""
    folder, _ = foreign(tmp_path)
    forge(folder, lambda of: setattr(of.record.properties, "dtype", dtype))
    array = read_metadata(folder)["decoder.final_layernorm.weight"]
    with pytest.raises(DamagedCheckpointError, match=f"it is of torch.bfloat16, not {dtype}; copy it again"):
        read_array(folder, array, Box.whole(array.shape))


def test_core_names_its_description_otherwise_since_0_15(tmp_path):
    """`MCoreMetadata` was once refused as an unknown class."""
    folder, _ = foreign(tmp_path)
    before = read_metadata(folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.mcore_data = {"decoder.final_layernorm.weight": {}}
    written = pickle.dumps(metadata, protocol=2)
    names = [b"ctorch.distributed.checkpoint.metadata\nMetadata\n"]
    names += [b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"]
    assert written.count(names[0]) == 1
    (folder / ".metadata").write_bytes(written.replace(*names))
    assert read_metadata(folder) == before
