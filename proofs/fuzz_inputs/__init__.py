"""Fuzz of everything a user hands in as a text or model file; `python -m proofs.fuzz_inputs --help`.

`mutate` changes valid inputs, `harness` runs them in processes with a time limit; `config_files`,
`tokenizer_files` and `hf_files` are the kinds of inputs, each with an independent reading to compare with.
"""
