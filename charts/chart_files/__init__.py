"""Files that are generated from the chart: the reference of its values and install.yaml."""
