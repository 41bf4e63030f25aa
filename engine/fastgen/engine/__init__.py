"""The engine process: step loop, messages, calibration, and the server's handle on it."""
