"""Write the files that are generated from the chart: `PYTHONPATH=tests:charts python -m chart_files`."""

from __future__ import annotations

from chart_files.files import write
from cluster.programs import ensure_programs

if __name__ == "__main__":
    write(ensure_programs() / "helm")
