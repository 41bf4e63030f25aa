"""Runs steps on a device: step input, model loading, device selection."""
