"""Names and numbers that scripts import from DeepSpeed's modules of constants."""

from __future__ import annotations

import importlib.util
from types import MappingProxyType
from typing import Any

from megazero.deepspeed.adopt import TIMEOUT
from megazero.deepspeed.surface import VERSION

VERSION_MAJOR, VERSION_MINOR, VERSION_PATCH = map(int, VERSION.split("."))
GIT_HASH = "megazero"
GIT_BRANCH = "megazero"
HAS_TRITON = importlib.util.find_spec("triton") is not None
DIST = None
"""`deepspeed.dist` is None until an engine is made; scripts import `deepspeed.comm` instead."""
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
DEFAULT_PG_TIMEOUT = TIMEOUT
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"

ADAM_OPTIMIZER, ADAMW_OPTIMIZER, ADAGRAD_OPTIMIZER = "adam", "adamw", "adagrad"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"
ONEBIT_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER = "onebitadam", "onebitlamb"
ZERO_ONE_ADAM_OPTIMIZER = "zerooneadam"
MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER = "muadam", "muadamw", "musgd"
DEEPSPEED_OPTIMIZERS = (
    *(ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, MUADAM_OPTIMIZER),
    *(MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER),
)
TORCH_ADAM_PARAM, ADAM_W_MODE, ADAM_W_MODE_DEFAULT = "torch_adam", "adam_w_mode", True

CONSTANTS = MappingProxyType(
    {
        "BFLOAT16": "bf16",
        "BFLOAT16_OLD": "bfloat16",
        "FP16": "fp16",
        "OPTIMIZER": "optimizer",
        "SCHEDULER": "scheduler",
        "TYPE": "type",
        "ROUTE_TRAIN": "train",
        "ROUTE_EVAL": "eval",
        "ROUTE_PREDICT": "predict",
        "ROUTE_ENCODE": "encode",
        "TRAIN_BATCH_SIZE": "train_batch_size",
        "TRAIN_MICRO_BATCH_SIZE_PER_GPU": "train_micro_batch_size_per_gpu",
        "GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
        "GRADIENT_CLIPPING": "gradient_clipping",
        "STEPS_PER_PRINT": "steps_per_print",
        "ZERO_OPTIMIZATION": "zero_optimization",
        "ZERO_ALLOW_UNTESTED_OPTIMIZER": "zero_allow_untested_optimizer",
    }
)
"""Keys of the JSON and words by which DeepSpeed's modules call them."""


def __getattr__(name: str) -> Any:
    if name not in CONSTANTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return CONSTANTS[name]
