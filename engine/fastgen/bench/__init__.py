"""Closed-loop load on an engine or a server, and its results."""
