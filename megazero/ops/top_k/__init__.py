"""The columns of each row's highest values, equal ones in order: a router's choice (Shazeer et al. 2017)."""

from megazero.ops.top_k.front import TOP_K, top_k

__all__ = ["TOP_K", "top_k"]
