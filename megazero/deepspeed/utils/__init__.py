"""utils: helpers around tensors and modules that a DeepSpeed script imports, and classes made of parts."""
