"""compression: training with quantized and pruned weights, and making the compression permanent.

DeepSpeed's compression library by its names and JSON (ZeroQuant, Yao et al. 2022; XTC, Wu et al. 2022), which
DeepSpeed 0.19 has dropped. Start with `compress.py`.
"""
