"""Text to token ids and back. Start at `build_tokenizer` (build.py); `fast.py` is the fast path.

Importing this package loads no tokenizer library; each kind imports its own when it is built.
"""
