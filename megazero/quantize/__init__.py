"""quantize: trained models in integers of 8 and 4 bits, as transformers and vLLM read them.

A model is read block by block, `calibrate` sums what its linear layers see, `rtn`, `gptq` and `scaling`
choose codes, and `export` says how they are stored. See docs/quantize.md.
"""
