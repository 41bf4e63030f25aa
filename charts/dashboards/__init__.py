"""The Grafana dashboards as Python code, from which the chart's files are generated."""
