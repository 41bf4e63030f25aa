"""Autoscaling policies: ours, and those of other systems according to their documentation or code."""
