"""/v1/chat/completions: from the body to a rendered request, and from its output to choices."""
