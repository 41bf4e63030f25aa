"""What is observed of one resource and what to write for it. Pure."""
