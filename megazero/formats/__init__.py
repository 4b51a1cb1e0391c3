"""formats: checkpoints of other libraries, presented as whole logical tensors.

`hf` reads and writes transformers' folders; `megatron` reads Megatron-LM's and Megatron-DeepSpeed's
checkpoints, and writes Megatron-LM's; `deepspeed` reads those of DeepSpeed's engine. `pickles.py` reads
pickles without running what they name.
"""
