"""The test bed: real Kubernetes on this machine, from a control plane alone to a node that runs pods."""
