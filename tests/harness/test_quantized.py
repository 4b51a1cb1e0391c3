"""`megazero lm-eval` scores a folder of codes as it scores the floats that the codes stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from proofs.harness_equal import tasks_in, write_models
from tests.forks import run

pytestmark = [pytest.mark.slow, pytest.mark.gloo]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def scores(folder: Path, tasks: Path, output: Path) -> dict:
    flags = ["--model_args", f"load={folder}", "--tasks", "local_goals,local_sums", "--include_path", tasks]
    done = run("-m", "megazero.cli", "lm-eval", *flags, "--output_path", output, environment=OFFLINE)
    assert done.returncode == 0, done.stderr
    assert "read as floats" not in done.stdout + done.stderr
    (path,) = output.rglob("results_*.json")
    return json.loads(path.read_text())["results"]


def write_floats(codes: Path, floats: Path, dense: Path) -> None:
    """Write a folder of the numbers that the codes stand for, as transformers reads them."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    config = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(codes, quantization_config=config)
    floats.mkdir()
    for path in dense.iterdir():
        (floats / path.name).write_bytes(path.read_bytes())
    names, weights = load_file(dense / "model.safetensors"), model.state_dict()
    save_file(
        {name: weights[name].float().contiguous().clone() for name in names},
        floats / "model.safetensors",
        {"format": "pt"},
    )


@pytest.mark.parametrize(("scheme", "group"), [("W8", None), ("W4", 32)])
def test_codes_score_as_their_floats(scheme, group, tmp_path):
    pytest.importorskip("lm_eval")
    write_models(tmp_path)
    tasks, dense, codes = tasks_in(tmp_path / "tasks"), tmp_path / "dense", tmp_path / "codes"
    flags = ["--scheme", scheme, "--method", "rtn", *(["--group-size", group] if group else [])]
    done = run("-m", "megazero.cli", "quantize", dense, *flags, "--out", codes, environment=OFFLINE)
    assert done.returncode == 0, done.stderr
    write_floats(codes, tmp_path / "floats", dense)
    ours = scores(codes, tasks, tmp_path / "ours")
    expected = scores(tmp_path / "floats", tasks, tmp_path / "expected")
    assert ours.keys() == expected.keys()
    for task, metrics in expected.items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert ours[task][name] == pytest.approx(value, rel=1e-5, abs=1e-6), (task, name)
