"""Runs steps on a device: the runner, model loading and device selection."""
