"""Command line tools around `megazero.data`: corpus, tokenizer training, preprocessing, merging, inspection.

Each runs as `megazero data TOOL`, from a checkout also as `python data_tools/NAME.py`, and offers
`main(argv, prog) -> exit status`.
"""
