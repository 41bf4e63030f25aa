"""Which replicas a scale-down removes first: those with the fewest tokens in flight."""
