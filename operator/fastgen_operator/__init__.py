"""Kubernetes operator that reconciles FastGenDeployments."""
