"""Reading checkpoints that DeepSpeed wrote, at any stage and of any number of ranks."""
