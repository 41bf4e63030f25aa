"""Read the metrics of engine pods: connections, Prometheus' text format, the scraper."""
