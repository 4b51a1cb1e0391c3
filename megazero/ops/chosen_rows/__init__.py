"""Rows chosen by number: how layers see some tokens of a sequence, and how these return among the others."""

from megazero.ops.chosen_rows.front import CHOSEN_ROWS, chosen_rows

__all__ = ["CHOSEN_ROWS", "chosen_rows"]
