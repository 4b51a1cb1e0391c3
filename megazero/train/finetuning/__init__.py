"""finetuning: from a pretrained model and labelled files to a classifier.

`task` reads the files and completes the configuration, `pretrained` takes the weights, `loop` evaluates after
each epoch (`answers`, `scores`), `best` keeps the best epoch's model, `predictions` writes a file, and `run`
puts these together.
"""
