"""The choice of tokens that a layer sees under random-LTD, ascending (Yao et al. 2022)."""

from megazero.ops.kept_columns.front import KEPT_COLUMNS, kept_columns

__all__ = ["KEPT_COLUMNS", "kept_columns"]
