"""Generated files: the reference of the chart's values, install.yaml, and the chart's copy of Envoy's configuration."""
