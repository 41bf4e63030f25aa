"""Reasoning of models before they answer."""
