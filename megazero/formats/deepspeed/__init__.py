"""deepspeed: reads checkpoints of DeepSpeed's engine, of any ZeRO stage and any number of ranks."""
