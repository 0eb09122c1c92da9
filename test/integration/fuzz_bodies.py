"""Requests, good and bad, for each operation of an OpenAPI document.

A body is one that works (`seeds`), with some fields of the schema put in or replaced: by values
that the schema allows, or by values that nobody expects. So requests get past the first check.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

DEPTH = 3

# Whatever the field: other types, limits of integers, nothing, too much, and nests of it.
ODD: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 3, 2**31, 2**31 - 1, 2**63, -(2**63), 10**30, 0.5, -0.1, 1e308),
    *("", "x", "w1 w2", "\0", "ä", "\N{GRINNING FACE}", "../..", "9" * 400, "{", "(", "a" * 3000),
    *([], [None], [[]], [0], [-1], [10**9], [2**63], ["w1"], [["w1"]], [{}], [1.5], [0, "x"]),
    *({}, {"a": None}, {"": {}}, {"type": "object"}, {"0": 1e9}, {"999999999": 1}, {"n": 10**9}),
)


@dataclass(frozen=True)
class Operation:
    """A method of a path, and what the document says about its input."""

    method: str
    path: str
    body: Mapping[str, Any] | None
    is_form: bool
    query: Mapping[str, Any]
    path_names: tuple[str, ...]

    @property
    def name(self) -> str:
        """For people, and for tables."""
        return f"{self.method} {self.path}"


@dataclass
class Sent:
    """What one request carries."""

    path: str
    query: dict[str, Any] = field(default_factory=dict)
    body: Any = None
    raw: bytes | None = None


def operations(document: Mapping[str, Any]) -> list[Operation]:
    """Every operation of the document, in its order."""
    found = []
    for path, methods in document["paths"].items():
        for method, given in methods.items():
            content = given.get("requestBody", {}).get("content", {})
            kinds = list(content)
            schema = content[kinds[0]]["schema"] if kinds else None
            parameters = given.get("parameters", [])
            query = {p["name"]: p["schema"] for p in parameters if p["in"] == "query"}
            names = tuple(p["name"] for p in parameters if p["in"] == "path")
            is_form = bool(kinds) and "json" not in kinds[0]
            found.append(Operation(method.upper(), path, schema, is_form, query, names))
    return found


class Bodies:
    """Strategies for the operations of one document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._schemas = document.get("components", {}).get("schemas", {})

    def requests(self, operation: Operation, seed: Mapping[str, Any]) -> st.SearchStrategy[Sent]:
        """Requests for an operation that answers `seed`."""
        query = self._changed(operation.query, {})
        body: st.SearchStrategy[Any] = st.none()
        raw: st.SearchStrategy[bytes | None] = st.none()
        if operation.body is not None:
            fields = self.fields(operation.body)
            body = self._changed(fields, seed) | st.sampled_from(ODD)
            if len(seed) > 0:  # far more of what gets past the first check
                body = st.one_of(*[self._changed(fields, seed)] * 6, st.sampled_from(ODD))
            raw = st.one_of(*[st.none()] * 9, st.sampled_from([b"", b"{", b"\xff", b"[" * 5000]))
        paths = st.just(operation.path)
        for name in operation.path_names:
            text = st.sampled_from(["x", "a/b", "%00", "..", "ä", "x" * 500])
            paths = st.builds(lambda p, t, n=name: p.replace("{" + n + "}", t), paths, text)
        return st.builds(Sent, paths, query, body, raw)

    def fields(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a body, by name."""
        schema = self._resolved(schema)
        found = dict(schema.get("properties", {}))
        for key in ("anyOf", "oneOf", "allOf"):
            for part in schema.get(key, []):
                found |= self.fields(part)
        return found

    def _changed(
        self, fields: Mapping[str, Any], seed: Mapping[str, Any]
    ) -> st.SearchStrategy[dict[str, Any]]:
        """`seed` with up to three fields put in or replaced."""
        names = sorted({*fields, *seed})
        if not names:
            return st.just({})
        one = st.sampled_from(names).flatmap(
            lambda name: st.tuples(st.just(name), self._value(fields, seed, name))
        )
        return st.lists(one, min_size=0, max_size=3).map(lambda pairs: {**seed, **dict(pairs)})

    def _value(
        self, fields: Mapping[str, Any], seed: Mapping[str, Any], name: str
    ) -> st.SearchStrategy[Any]:
        odd = st.sampled_from(ODD)
        inner = seed.get(name)
        if isinstance(inner, dict):
            return odd | self._changed({}, inner)
        return odd | self.valid(fields[name]) if name in fields else odd

    def valid(self, schema: Mapping[str, Any], depth: int = DEPTH) -> st.SearchStrategy[Any]:
        """Values that a schema allows, as far as types go."""
        schema = self._resolved(schema)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return st.one_of(*[self.valid(part, depth) for part in schema[key]])
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        kind = schema.get("type")
        if kind == "object" and depth > 0:
            inner = schema.get("properties", {})
            wanted = {k: self.valid(v, depth - 1) for k, v in inner.items()}
            needed = set(schema.get("required", []))
            return st.fixed_dictionaries(
                {k: v for k, v in wanted.items() if k in needed},
                optional={k: v for k, v in wanted.items() if k not in needed},
            )
        if kind == "array" and depth > 0:
            return st.lists(self.valid(schema.get("items", {}), depth - 1), max_size=3)
        return _PLAIN.get(kind, st.sampled_from(ODD))

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema


_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    "string": st.sampled_from(["", "x", "w1 w2", "default", "a", "ä\0", "x" * 500]),
    "integer": st.sampled_from([0, 1, 2, -1, 7, 1000, 2**31, 2**63 - 1, 2**64, -(2**40)]),
    "number": st.sampled_from([0, 0.5, 1, -1.0, 1e300, 1e-300]),
    "boolean": st.booleans(),
    "null": st.none(),
    "object": st.sampled_from([{}, {"a": 1}]),
    "array": st.sampled_from([[], [1], ["x"]]),
}
