"""Write the files that are generated from the chart: `cd charts && python -m chart_files`."""

from __future__ import annotations

from chart_files.files import write

if __name__ == "__main__":
    write()
