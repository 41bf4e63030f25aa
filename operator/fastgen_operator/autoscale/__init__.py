"""How many replicas there are to be."""
