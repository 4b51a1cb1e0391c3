"""models: parts of a script's own models: recomputation, random-LTD, tiled and low-rank layers."""
