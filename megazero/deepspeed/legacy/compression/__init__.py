"""compression: layers that train with quantized and pruned weights, and models made smaller for good.

DeepSpeed's compression library by its names and JSON (ZeroQuant, Yao et al. 2022; XTC, Wu et al. 2022),
which DeepSpeed 0.19 has dropped. Start with `compress.py`; `settings.py` reads the JSON section, `layers.py`
has the layers, `quantize.py` and `prune.py` the formulas, and `helper.py` takes a student's layers from its
teacher.
"""
