"""`python -m dashboards` (in the folder charts): writes what the chart holds."""

from __future__ import annotations

from dashboards.files import FOLDER, rendered

if __name__ == "__main__":
    for name, text in rendered().items():
        (FOLDER / name).write_text(text)
