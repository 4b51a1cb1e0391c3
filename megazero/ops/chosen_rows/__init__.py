"""The choice of rows by number, which takes a layer's tokens out of a sequence and puts them back."""

from megazero.ops.chosen_rows.front import CHOSEN_ROWS, chosen_rows

__all__ = ["CHOSEN_ROWS", "chosen_rows"]
