"""The section of the tree about the model."""

from __future__ import annotations

from megazero.config.tree.experts import ExpertsConfig
from megazero.config.tree.heads import BertConfig, ClassifierConfig
from megazero.config.tree.routing import RoutingConfig


class ModelConfig(RoutingConfig, ExpertsConfig, ClassifierConfig, BertConfig):
    """Model shape"""
