"""The error of a schema that cannot be enforced."""

from __future__ import annotations


class SchemaError(ValueError):
    """A schema that is invalid or cannot be enforced. The message begins with the place in it, if it concerns one."""

    @classmethod
    def at(cls, place: str, fault: str) -> SchemaError:
        """Return the error of a fault at a place such as `properties.age.minimum`; "" is the whole schema."""
        return cls(f"{place}: {fault}" if place else fault)


def within(place: str, *keys: str | int) -> str:
    """Return the place of a part of the schema at `place`; long keys are cut."""
    shown = [str(key)[:60] for key in keys]
    return ".".join([place, *shown] if place else shown)
