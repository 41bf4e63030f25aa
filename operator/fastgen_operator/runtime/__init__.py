"""The operator as a process: controller loops, informers, leader election, probes, settings."""
