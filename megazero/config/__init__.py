"""The configuration of a run: one frozen tree, its command line, YAML form, rules and documentation."""

from megazero.config.resolve import Resolved, parse_config, resolve_or_exit
from megazero.config.tree import Config

__all__ = ["Config", "Resolved", "parse_config", "resolve_or_exit"]
