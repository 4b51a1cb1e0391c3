"""`init_inference`: a user's model for inference, sliced over ranks and converted to a dtype."""
