"""moe: DeepSpeed's mixture-of-experts layer for any model; scripts import it from `megazero.moe`."""
