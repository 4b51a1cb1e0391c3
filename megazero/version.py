"""The version of megazero, as `megazero version` prints it and checkpoints keep it."""

VERSION = "0.1.0"
