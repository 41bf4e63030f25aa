"""How many replicas: from what the engines say of themselves to a decision. Pure but for `scrape` and `loop`."""
