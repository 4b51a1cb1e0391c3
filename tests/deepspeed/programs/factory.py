"""LLaMA-Factory's supervised fine-tuning, started by its own command: ``factory.py FOLDER STAGE``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.deepspeed.programs.small_model import prepare

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    prepare(folder, int(sys.argv[2]))
    settings = {
        "model_name_or_path": str(folder / "model"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "deepspeed": str(folder / "ds.json"),
        "dataset_dir": str(folder / "data"),
        "dataset": "rows",
        "template": "default",
        "cutoff_len": 48,
        "output_dir": str(folder / "out"),
        "logging_steps": 1,
        "save_steps": 3,
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "cosine",
        "report_to": "none",
        "use_cpu": True,
        "disable_gradient_checkpointing": True,
        "preprocessing_num_workers": 1,
    }
    (folder / "sft.yaml").write_text(json.dumps(settings))
    environment = {**os.environ, "FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "1", "DISABLE_VERSION_CHECK": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "llamafactory.cli", "train", str(folder / "sft.yaml")]
    sys.exit(subprocess.run(command, env=environment).returncode)
