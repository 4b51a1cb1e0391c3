"""Command line tools around `megazero.data`: corpus, tokenizer training, preprocessing, merging, inspection.

Each runs from a checkout as `python data_tools/NAME.py` and offers `main(argv) -> exit status`.
"""
