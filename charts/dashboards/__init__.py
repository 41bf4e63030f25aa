"""The Grafana dashboards, written in Python; the chart holds what comes out."""
