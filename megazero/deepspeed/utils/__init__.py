"""utils: helpers for tensors and modules that DeepSpeed scripts import, and classes composed of parts."""
