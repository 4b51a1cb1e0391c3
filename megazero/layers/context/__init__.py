"""Attention where ranks share each sequence."""
