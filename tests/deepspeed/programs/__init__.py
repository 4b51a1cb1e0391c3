"""Programs that drive `deepspeed` through libraries of others; each runs on DeepSpeed itself, too."""
