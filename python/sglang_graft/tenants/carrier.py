"""How a request carries its tenant to the scheduler: in the text that SGLang calls `extra_key`.

The HTTP process writes it over whatever the client sent, whose own text follows at the end; so no
client can name a tenant. The same text makes the KV namespace: a tenant's own, or the one that all
share who say `share_kv`.
"""

_MARK = "\x01graft\x01"
_END = "\x01"
_OWN, _SHARED, _OPERATOR = "p", "s", "o"


def encode(tenant: str | None, client: str, *, shared: bool) -> str:
    """The text for a request of `tenant` (None: the operator's) with the client's own `client`."""
    kind = _OPERATOR if tenant is None else (_SHARED if shared else _OWN)
    return f"{_MARK}{tenant or ''}{_END}{kind}{client}"


def decode(text: str) -> tuple[str, bool, str]:
    """(tenant, whether its KV is shared, salt of the KV); the tenant is "" for the operator.

    Salts of different tenants never meet, unless both are shared: names have no control character.
    Without a text of the client's own, what is shared is shared with the operator too.
    """
    if not text.startswith(_MARK):
        return "", False, text
    tenant, _, rest = text[len(_MARK) :].partition(_END)
    kind, client = rest[:1], rest[1:]
    if kind == _OWN:
        return tenant, False, f"{_OWN}{tenant}{_END}{client}"
    if kind == _SHARED:
        return tenant, True, _SHARED + client if client else ""
    return tenant, False, client
