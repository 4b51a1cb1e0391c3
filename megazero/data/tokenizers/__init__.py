"""Text to token ids and back; start at `build.build_tokenizer`.

Importing this package loads no tokenizer library; each kind imports its own when a tokenizer is built.
"""
