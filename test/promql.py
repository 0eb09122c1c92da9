"""What PromQL expressions ask for, to be compared with what a server exposes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import promql_parser as promql

TARGET_LABELS = {"instance", "job"}
"""Labels that Prometheus itself adds to each sample."""


@dataclass
class Selector:
    """One selector: its metric, the labels that it or an aggregation around it names, and the
    values that must be equal."""

    name: str
    labels: set[str] = field(default_factory=set)
    equal: dict[str, str] = field(default_factory=dict)


def selectors(text: str) -> list[Selector]:
    """Every selector of an expression. ValueError when it is no PromQL."""
    return list(_walk(promql.parse(text), frozenset()))


def _walk(node: Any, grouped: frozenset[str]) -> Iterator[Selector]:
    if isinstance(node, promql.VectorSelector):
        matchers = node.matchers.matchers
        labels = {matcher.name for matcher in matchers} | grouped
        equal = {m.name: m.value for m in matchers if m.op == promql.MatchOp.Equal}
        yield Selector(node.name, labels, equal)
    elif isinstance(node, promql.MatrixSelector):
        yield from _walk(node.vector_selector, grouped)
    elif isinstance(node, promql.AggregateExpr):
        by = frozenset(node.modifier.labels) if node.modifier else frozenset()
        yield from _walk(node.expr, grouped | by)
    elif isinstance(node, promql.Call):
        for argument in node.args:
            yield from _walk(argument, grouped)
    elif isinstance(node, promql.BinaryExpr):
        yield from _walk(node.lhs, grouped)
        yield from _walk(node.rhs, grouped)
    elif isinstance(node, promql.ParenExpr | promql.UnaryExpr | promql.SubqueryExpr):
        yield from _walk(node.expr, grouped)
    else:
        assert isinstance(node, promql.NumberLiteral | promql.StringLiteral), node
