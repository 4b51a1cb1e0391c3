"""checkpoint: saved states, in our format or in DeepSpeed's files, read as whole tensors."""
