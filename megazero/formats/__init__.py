"""formats: checkpoints of other libraries, read as whole logical tensors and, for Hugging Face's, written.

`hf` has transformers' folders, `megatron` those of Megatron-LM and Megatron-DeepSpeed, `deepspeed` those of
DeepSpeed's engine; `pickles.py` reads pickles without running what they name.
"""
