"""`init_inference`: a given model for generation, sliced over ranks and in another type."""
