"""A model's own sampling defaults, from its generation_config.json."""

from __future__ import annotations

from pathlib import Path

from fastgen.core.request import RequestError, SamplingParams
from fastgen.model import ModelError
from fastgen.model_files import read_json_object

# The fields that vLLM reads too. `do_sample` is left out, as there: a server samples unless temperature is 0.
_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_MAX_TOKENS = "max_new_tokens"

# Values by name of the sampling parameter; `max_tokens` is the default length of a chat's answer.
GenerationDefaults = dict[str, float | int]


def generation_defaults(name: str, model: Path) -> GenerationDefaults:
    """Return the sampling parameters of requests that do not set them; a GGUF file has none.

    `name` is the setting `generation_config`: `auto` reads the file, `none` leaves OpenAI's defaults.

    Raises:
        ModelError: if the file is not JSON or a value cannot be used.
    """
    path = model / "generation_config.json"
    if name == "none" or not model.is_dir() or not path.is_file():
        return {}
    given = read_json_object(path)
    named = {field: given.get(field) for field in _FIELDS} | {"max_tokens": given.get(_MAX_TOKENS)}
    defaults = {field: value for field, value in named.items() if value is not None}
    for field, value in defaults.items():
        if type(value) not in (int, float):
            raise ModelError(f"{path}: {field} is {value!r}: expected a number, or start with --generation-config none")
    if defaults.get("top_k", 0) < 0:  # -1 is "off" in vLLM's spelling
        defaults["top_k"] = 0
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ModelError(f"{path}: {error}; correct it, or start with --generation-config none") from None
    return defaults
