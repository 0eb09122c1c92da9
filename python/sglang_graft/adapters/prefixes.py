"""Where the decoder layers stand in a module path, whatever the model is wrapped in.

The same layers are `model.layers` in a causal model, `layers` in its bare stack, and
`model.language_model.layers` beside a vision tower. A path is taken for the model's own when what
stands before `layers` names wrappers only, and then only if all paths of the file say the same: a
tower with layers of its own (`vision_tower.encoder.layers`) is never taken for the decoder.
"""

import re
from collections.abc import Container
from dataclasses import dataclass

# Words that stand for a model as a whole, by transformers, PEFT, DDP, FSDP and torch.compile.
_WRAPPERS = frozenset(
    {"base_model", "model", "language_model", "text_model"}
    | {"module", "_fsdp_wrapped_module", "_orig_mod"}
)
_LAYER = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class Place:
    """`{prefix}.{layer}.{rest}`, prefix up to and with `layers`."""

    prefix: str
    layer: int
    rest: str


class PrefixReader:
    """Splits the module paths of one file, and remembers the prefix that they share."""

    def __init__(self, layer_prefix: str, known: Container[str]) -> None:
        self._own = layer_prefix
        self._layers = layer_prefix.rpartition(".")[2]
        self._known = known
        self._first: tuple[str, str] | None = None

    def split(self, path: str) -> Place | None:
        """The parts of `path`, None when it leads to no known module of the decoder layers."""
        before, found, behind = f".{path}".rpartition(f".{self._layers}.")
        number, _, rest = behind.partition(".")
        if not found or rest not in self._known or not _LAYER.fullmatch(number):
            return None
        prefix = f"{before}.{self._layers}"[1:]
        if prefix != self._own and not _WRAPPERS.issuperset(before.split(".")[1:]):
            return None
        return Place(prefix, int(number), rest)

    def conflict(self, place: Place, name: str) -> str | None:
        """The first tensor of the file if it has another prefix than `place`, that of `name`."""
        if self._first is None:
            self._first = place.prefix, name
        prefix, first = self._first
        return None if prefix == place.prefix else first
