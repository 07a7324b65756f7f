"""Model types of the catalogue, by what it says of them."""

from typing import Any

from posembed.models import catalogue

TYPES: dict[str, dict[str, Any]] = catalogue.types()


def having(key: str, *values: Any) -> list[str]:
    """The model types that have an entry, with one of these values if any are given."""
    return sorted(name for name, own in TYPES.items() if key in own and (not values or own[key] in values))
