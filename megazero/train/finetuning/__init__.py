"""finetuning: from a pretrained model and labelled files to a classifier.

`task` reads the files and completes the configuration (`epochs` does that of any samples in memory),
`pretrained` loads the weights, `evaluation` evaluates each epoch (with `scores`), `best` saves the best
epoch's model, `predictions` writes a file, and `run` puts these together.
"""
