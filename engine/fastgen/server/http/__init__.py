"""HTTP concerns: authentication, limits, server-sent events, errors, tracing."""
