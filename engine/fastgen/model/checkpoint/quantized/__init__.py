"""Weights that a checkpoint stores quantised: one file for each format."""
