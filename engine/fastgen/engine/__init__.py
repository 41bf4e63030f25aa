"""The engine and its process: step loop and calibration."""
