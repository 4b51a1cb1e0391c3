"""DeepSpeed's mixture-of-experts layer, for models of any kind.

`layer.MoE` has `copies` of any module as experts; `experts` says which rank holds which, and `utils` has what
scripts call beside the layer. Users import them from `megazero.moe`.
"""
