"""The generated files, by path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from chart_files.install_manifest import install_manifest
from chart_files.values_page import values_page
from fastgen_gateway.bootstrap import BOOTSTRAP, CERTIFICATE, POOLS, with_tls

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "charts" / "fastgen"


def texts(helm: Path) -> dict[Path, str]:
    """Return the text of each generated file; `helm` is the program."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    return {
        ROOT / "docs/reference/helm-values.md": values_page((CHART / "values.yaml").read_text(), schema),
        ROOT / "install.yaml": install_manifest(helm, CHART),
        # Envoy's configuration belongs to the gateway, and the chart has copies.
        CHART / "files" / "envoy.yaml": BOOTSTRAP.read_text(),
        CHART / "files" / "envoy-with-tls.yaml": with_tls(BOOTSTRAP.read_text()),
        CHART / "files" / "certificate.yaml": CERTIFICATE.read_text(),
        CHART / "files" / "pools.yaml": POOLS.read_text(),
    }


def write(helm: Path) -> None:
    """Write the generated files."""
    for path, text in texts(helm).items():
        path.write_text(text)
