"""Test bed: real Kubernetes on this machine, as a bare control plane or as a node that runs pods."""
