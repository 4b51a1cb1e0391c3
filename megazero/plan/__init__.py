"""What a training would do, worked out from its own code on tensors without content."""
