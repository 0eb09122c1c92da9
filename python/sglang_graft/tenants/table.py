"""Which key is whose, and which names each tenant may use."""

import re
from collections.abc import Iterable, Mapping

from sglang_graft.tenants.file import Tenant
from sglang_graft.tenants.keys import matches

MAX_NAME = 256
"""Characters of the longest name that a tenant may use."""


class TenantTable:
    """Tenants by name; one consistent state of the file."""

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self.tenants = dict(tenants)
        self._owners = {key: name for name, tenant in tenants.items() for key in tenant.keys}
        self._names = {name: _matcher(tenant.adapters) for name, tenant in tenants.items()}

    def owner(self, key: str) -> str | None:
        """The tenant of an API key."""
        found = matches(key, self._owners)
        return None if found is None else self._owners[found]

    def may_use(self, tenant: str, name: str) -> bool:
        """Whether a tenant may use an adapter or alias; one that has left may use nothing."""
        found = self._names.get(tenant)
        fits = len(name) <= MAX_NAME  # a client's own text
        return found is not None and fits and found.fullmatch(name) is not None

    def may_use_base(self, tenant: str) -> bool:
        """Whether a tenant may use the base model itself."""
        found = self.tenants.get(tenant)
        return found is not None and found.base

    def visible(self, tenant: str, names: Iterable[str]) -> list[str]:
        """Those of `names` that a tenant may use, in their order."""
        return [name for name in names if self.may_use(tenant, name)]


def _matcher(globs: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(_expression, globs)) or r"(?!)", re.DOTALL)


def _expression(glob: str) -> str:
    """`*` is any run without "/", `**` any run, `?` one character but "/"; nothing else is special.

    Stars beside each other become one, so that no name takes long to be compared.
    """
    parts = re.findall(r"\*+|\?|[^*?]+", glob)
    made = []
    for part in parts:
        if part.startswith("**"):
            made.append(".*")
        else:
            made.append({"*": "[^/]*", "?": "[^/]"}.get(part, re.escape(part)))
    return "".join(made)
