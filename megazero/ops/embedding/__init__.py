"""Rows of a table by token id, the table sliced over ranks."""

from megazero.ops.embedding.front import EMBEDDING, embedding

__all__ = ["EMBEDDING", "embedding"]
