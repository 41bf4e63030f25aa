"""Generate the chart's dashboards: `cd charts && python -m dashboards`."""

from __future__ import annotations

from dashboards.files import FOLDER, rendered

if __name__ == "__main__":
    for name, text in rendered().items():
        (FOLDER / name).write_text(text)
