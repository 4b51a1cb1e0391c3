"""post_training: what a pretrained model learns next; `policy` has policy gradients on its own answers."""
