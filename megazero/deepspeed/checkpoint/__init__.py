"""checkpoint: reading saved states, in megazero's format or in DeepSpeed's, as whole tensors."""
