"""docs/how-to/model-images.md: the image that it builds is the one that it serves."""

from __future__ import annotations

import re

from fastgen_operator.api.model import Model
from support.pages import blocks, documents

PAGE = "docs/how-to/model-images.md"


def of_the_page(language: str) -> list[str]:
    """Return the code blocks of the page in a language."""
    return [text for place, text in blocks(language) if place.startswith(f"{PAGE}:")]


def test_the_model_lies_where_the_engine_looks_for_it() -> None:
    (source,) = [each["spec"]["model"]["source"] for place, each in documents() if place.startswith(f"{PAGE}:")]
    model = Model(source=source)
    (recipe,), (script,) = of_the_page("dockerfile"), of_the_page("sh")
    downloaded = re.findall(r"fastgen fetch \S+ --to (\S+)", script)
    assert re.findall(r"COPY (\S+) (\S+)", recipe) == [(downloaded[0], model.path_in_image)]
    built = re.findall(r"buildah build --tag (\S+) [.]", script)
    pushed = re.findall(r"buildah push --digestfile digest (\S+)", script)
    assert built == pushed
    assert model.image is not None
    assert built[0].rpartition(":")[0] == model.image.partition("@")[0]
