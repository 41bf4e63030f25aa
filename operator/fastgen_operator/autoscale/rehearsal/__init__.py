"""Replay the recent past of a fleet with other settings, and learn a lower bound for the replicas from it. Pure."""
