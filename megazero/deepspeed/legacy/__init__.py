"""legacy: what DeepSpeed has removed since, or no pretraining script uses; no other room imports it."""
