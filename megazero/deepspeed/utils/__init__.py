"""utils: the helpers that a DeepSpeed script imports: logging, timers, tensors, modules, groups of ranks."""
