"""The section of the tree about the model."""

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

    roles = Role.NONE  # each field says itself whether its value makes another model
