"""harness: a trained model scored by lm-evaluation-harness, and by Megatron's own tasks."""
