"""Reads and writes of Kubernetes objects: client, informer cache, Events, lease."""
