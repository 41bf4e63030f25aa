"""Read the metrics of engine pods: connections, the Prometheus text format, and the scraper."""
