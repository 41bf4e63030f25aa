"""Ways to choose the number of replicas: ours, and those of other systems, each by its own documents or code."""
