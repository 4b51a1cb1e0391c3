"""Blends that change while a run goes on, without losing or repeating a sample; a loss by validation set."""
