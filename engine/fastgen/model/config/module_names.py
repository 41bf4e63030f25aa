"""Lists of module names in `quantization_config`, each library with its own rule for what an entry matches.

Entries may be regular expressions of a file that nobody has checked. Python's engine can take exponential time, so an
expression with a repeated group or many repetitions is rejected.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from fastgen.model import ModelError
from fastgen.model.config.fields import shown

_MOST_REPETITIONS = 4
_LONGEST = 500  # characters of an expression, or of a name that is matched


@dataclass(frozen=True)
class ModuleNames(ABC):
    """A list of modules.

    Raises:
        ModelError: if an entry is a regular expression that cannot be used.
    """

    entries: tuple[str, ...]

    def __post_init__(self) -> None:
        for _ in self._patterns:
            pass

    def __contains__(self, module: str) -> bool:
        """Return whether an entry matches the module's full name."""
        return len(module) <= _LONGEST and self._matches(module)

    @abstractmethod
    def _matches(self, module: str) -> bool: ...

    @property
    def _expressions(self) -> list[str]:
        """Regular expressions that are matched from a name's first character."""
        return []

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(map(_compiled, self._expressions))


class TransformersNames(ModuleNames):
    """Prefixes that end where a module's name does, as regular expressions; or suffixes.

    Source: `should_convert_module` in transformers 5.23, quantizers/quantizers_utils.py.
    """

    @classmethod
    def all(cls) -> TransformersNames:
        """Return the list of all modules."""
        return cls(("",))

    @property
    def _expressions(self) -> list[str]:
        return [rf"(?:{entry})(?:(?<=\.)|(?=\.|$))" for entry in self.entries if entry]

    def _matches(self, module: str) -> bool:
        return module.endswith(self.entries) or any(pattern.match(module) for pattern in self._patterns)


class CompressedTensorsNames(ModuleNames):
    """Full names, regular expressions after `re:`, or the class `Linear`, which all quantised modules are.

    Source: `match_name` and `_match_class` in compressed-tensors 0.20, utils/match.py.
    """

    @property
    def _expressions(self) -> list[str]:
        return [entry.removeprefix("re:") for entry in self.entries if entry.startswith("re:")]

    def _matches(self, module: str) -> bool:
        if "Linear" in self.entries or module in self.entries:
            return True
        return any(pattern.match(module) for pattern in self._patterns)


class WildcardNames(ModuleNames):
    """Full names with `*`, or names of modules that contain others.

    Source: `ModelOptQuantConfigBase.is_layer_excluded` in vLLM 0.20, quantization/modelopt.py.
    """

    def _matches(self, module: str) -> bool:
        return any(fnmatchcase(module, entry) or module.startswith(f"{entry}.") for entry in self.entries)


def _compiled(expression: str) -> re.Pattern[str]:
    repetitions = sum(expression.count(sign) for sign in "*+{")
    has_repeated_group = re.search(r"\)[*+{]", expression) is not None
    if len(expression) > _LONGEST or repetitions > _MOST_REPETITIONS or has_repeated_group:
        raise ModelError(
            f"quantization_config names modules as {shown(expression)}: this regular expression may take too long; "
            f"use one of at most {_LONGEST} characters with at most {_MOST_REPETITIONS} repetitions and no repeated "
            "groups"
        )
    try:
        return re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(
            f"quantization_config names modules as {shown(expression)}: not a regular expression ({error})"
        ) from None
