"""The section `model`, which is put together from classes by subject."""

from __future__ import annotations

from megazero.config.t5.settings import T5Config
from megazero.config.tree.experts import ExpertsConfig
from megazero.config.tree.heads import BertConfig, ClassifierConfig, MultiTokenConfig, WordLossConfig
from megazero.config.tree.roles import Role
from megazero.config.tree.routing import RoutingConfig
from megazero.config.tree.sparse import SparseAttentionConfig


class ModelConfig(
    RoutingConfig,
    ExpertsConfig,
    SparseAttentionConfig,
    WordLossConfig,
    ClassifierConfig,
    MultiTokenConfig,
    BertConfig,
    T5Config,
):
    """Model shape"""

    roles = Role.NONE  # each field is declared by `of_model` or `of_training`
