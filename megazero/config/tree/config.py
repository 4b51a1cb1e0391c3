"""The configuration: one frozen, typed tree that every other part of megazero reads.

A field states its type, default and meaning once. `flags.py` turns the metadata into command line
flags, `document.py` reads and writes YAML, `reference.py` writes the documentation, and `rules/` checks
what spans fields. Names are Megatron's wherever Megatron has one.
"""

from __future__ import annotations

from megazero.config.fim import FimConfig
from megazero.config.policy.settings import PolicyConfig
from megazero.config.preference.rewards import RewardConfig
from megazero.config.preference.settings import PreferenceConfig
from megazero.config.tree.acceleration import AccelerationConfig
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.config.tree.curriculum import CurriculumConfig
from megazero.config.tree.data import DataConfig
from megazero.config.tree.data_sampling import DataSamplingConfig
from megazero.config.tree.distillation import DistillationConfig
from megazero.config.tree.finetune import FinetuneConfig
from megazero.config.tree.guards import GuardsConfig
from megazero.config.tree.logging import LoggingConfig
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.offload import OffloadConfig
from megazero.config.tree.optimizer import OptimizerConfig
from megazero.config.tree.option import Section
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.precision import PrecisionConfig
from megazero.config.tree.profiling import ProfilingConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.config.tree.skipping import SkippingConfig
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.config.tree.training import BatchConfig, TrainingConfig
from megazero.config.tree.zero import ZeroConfig


class Config(Section):
    """Everything that determines a run."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    zero: ZeroConfig = ZeroConfig()
    offload: OffloadConfig = OffloadConfig()
    batch: BatchConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig = PrecisionConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    acceleration: AccelerationConfig = AccelerationConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    fim: FimConfig = FimConfig()
    training: TrainingConfig = TrainingConfig()
    guards: GuardsConfig = GuardsConfig()
    finetune: FinetuneConfig = FinetuneConfig()
    preference: PreferenceConfig = PreferenceConfig()
    reward: RewardConfig = RewardConfig()
    distillation: DistillationConfig = DistillationConfig()
    policy: PolicyConfig = PolicyConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    data_sampling: DataSamplingConfig = DataSamplingConfig()
    skipping: SkippingConfig = SkippingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    profiling: ProfilingConfig = ProfilingConfig()
