"""Which adapter the fields of one request name together.

`model` is OpenAI's way, `lora_path` SGLang's, and `lora_name` that of gateways made for vLLM. A
request may use any of them, on any route, and several if they agree.
"""

from typing import Any

Named = str | list[str | None] | None
"""One adapter, one for each prompt of a batch (None is the base model), or the base model."""


class ConflictError(ValueError):
    """Two fields of a request name different adapters."""

    status_code = 400


def agreed(**fields: Named) -> Named:
    """What all `fields` that name something name. Raises ConflictError.

    An empty text names nothing. A list agrees with a name when every entry is that name.
    """
    given = {field: named for field, named in fields.items() if named}
    (first, chosen), *others = given.items() or [("", None)]
    for field, named in others:
        if set(_listed(named)) != set(_listed(chosen)):
            raise ConflictError(
                f"{first} names {_shown(chosen)} and {field} names {_shown(named)}:"
                " wanted one adapter, or only one of these fields"
            )
        if isinstance(named, list) and isinstance(chosen, list) and named != chosen:
            raise ConflictError(f"{first} and {field} name adapters in another order")
    return next((named for named in given.values() if isinstance(named, list)), chosen)


def names_of(named: Named) -> list[str]:
    """Every adapter in it once, in order."""
    return list(dict.fromkeys(name for name in _listed(named) if name))


def only(named: Named) -> str | None:
    """The one adapter that all prompts want, None for the base model or several."""
    wanted = set(_listed(named))
    return wanted.pop() or None if len(wanted) == 1 else None


def _listed(named: Named) -> list[str | None]:
    return named if isinstance(named, list) else [named]


def _shown(named: Any) -> str:
    return ", ".join(map(repr, _listed(named)))
