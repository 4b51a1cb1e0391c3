"""tree: the sections of the configuration, one file each, and `Config`, which holds them all."""

from megazero.config.tree.config import Config

__all__ = ["Config"]
