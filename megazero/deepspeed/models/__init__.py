"""models: what scripts build models of: recomputation, random-LTD, tiled and low-rank layers."""
