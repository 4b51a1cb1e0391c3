"""tree: the sections of the configuration, one file each, and `Config`, which holds them all."""

from megazero.config.tree.acceleration import AccelerationConfig
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.config.tree.config import Config
from megazero.config.tree.curriculum import CurriculumConfig
from megazero.config.tree.data import DataConfig
from megazero.config.tree.data_sampling import CurriculumMetric, DataSamplingConfig
from megazero.config.tree.distillation import DistillationConfig
from megazero.config.tree.experts import ExpertsConfig
from megazero.config.tree.finetune import FinetuneConfig
from megazero.config.tree.guards import GuardsConfig
from megazero.config.tree.logging import LoggingConfig
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.offload import OffloadConfig
from megazero.config.tree.optimizer import OptimizerConfig, OptimizerName
from megazero.config.tree.option import Section
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.precision import PrecisionConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.config.tree.routing import RouterConfig, RoutingConfig
from megazero.config.tree.skipping import SkippingConfig
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.config.tree.training import BatchConfig, TrainingConfig
from megazero.config.tree.transformer import TransformerConfig
from megazero.config.tree.zero import ZeroConfig

__all__ = [
    "AccelerationConfig",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "CurriculumConfig",
    "CurriculumMetric",
    "DataConfig",
    "DataSamplingConfig",
    "DistillationConfig",
    "ExpertsConfig",
    "FinetuneConfig",
    "GuardsConfig",
    "LoggingConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "OptimizerName",
    "ParallelConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "RouterConfig",
    "RoutingConfig",
    "Section",
    "SkippingConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "TransformerConfig",
    "ZeroConfig",
]
