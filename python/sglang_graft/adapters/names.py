"""The grammar of tensor names: from a name in the file to one matrix of one module.

    [base_model.model.] model.layers.{layer}.{parent}.{module} .lora_A|.lora_B [.adapter] .weight

`module` is a linear of the spec, or the name of a fused group (qkv_proj, gate_up_proj) whose B is
the members' B matrices stacked.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sglang_graft.adapters.errors import AdapterError
from sglang_graft.adapters.spec import LinearSpec, ModelSpec
from sglang_graft.adapters.tiles import SideName

_PREFIX = "base_model.model."
# The shortest path wins, so that an adapter may itself be called "lora_B".
_NAME = re.compile(r"(?P<path>.+?)\.lora_(?P<side>[AB])(\.(?P<adapter>[^.]+))?\.weight")
_LAYER = re.compile(r"0|[1-9][0-9]{0,8}")

# Substring of a name -> why it is refused; the first hit speaks.
_KNOWN_REFUSALS = (
    ("lora_magnitude_vector", "DoRA magnitudes are not supported"),
    ("lora_embedding_", "LoRA on embeddings is not supported"),
    ("experts", "LoRA on experts is not supported"),
    ("lm_head", "LoRA on or a copy of lm_head is not supported"),
    ("embed_tokens", "LoRA on or a copy of embed_tokens is not supported"),
    ("modules_to_save", "full copies of base modules are not supported"),
    ("token_adapter", "changed token embeddings are not supported"),
    ("base_layer", "weights of the base model do not belong in an adapter"),
    (".bias", "bias tensors are not supported"),
)


@dataclass(frozen=True, slots=True)
class Module:
    """A module that the file speaks of: one linear, or several that share a fused tensor."""

    layer: int
    path: str
    members: tuple[LinearSpec, ...]

    @property
    def in_features(self) -> int:
        """Columns of A."""
        return self.members[0].in_features

    @property
    def out_features(self) -> int:
        """Rows of B, all members together."""
        return sum(member.out_features for member in self.members)


@dataclass(frozen=True, slots=True)
class TensorPair:
    """The names of A and B of one module in the file."""

    module: Module
    a: str
    b: str


class NameReader:
    """Maps the tensor names of one file onto the modules of `spec`."""

    def __init__(self, file: Path, spec: ModelSpec) -> None:
        self._file = file
        self._spec = spec
        self._members = {
            f"{members[0].parent}.{group}": members for group, members in spec.groups().items()
        }
        self._members |= {f"{linear.parent}.{linear.name}": (linear,) for linear in spec.linears}

    def pairs(self, names: Iterable[str]) -> list[TensorPair]:
        """A and B of every module, ascending by layer and path.

        Raises AdapterError naming the tensor that fits nowhere, lacks its partner, or repeats what
        another tensor says.
        """
        found: dict[Module, dict[SideName, str]] = {}
        adapters: dict[str | None, str] = {}
        for name in sorted(names):
            module, side, adapter = self._parse(name)
            adapters.setdefault(adapter, name)
            if len(adapters) > 1:
                first, second = adapters.values()
                raise self._error(second, f"names another adapter than {first} in the same file")
            if side in found.setdefault(module, {}):
                raise self._error(name, f"is the same matrix as {found[module][side]}")
            found[module][side] = name
        if not found:
            raise self._error("tensors", "wanted LoRA tensors of this model, got none")
        self._refuse_overlap(found)
        pairs = [self._pair(module, sides) for module, sides in found.items()]
        return sorted(pairs, key=lambda pair: (pair.module.layer, pair.module.path))

    def _parse(self, name: str) -> tuple[Module, SideName, str | None]:
        parts = _NAME.fullmatch(name)
        if parts is None:
            raise self._error(name, self._why_refused(name))
        side: SideName = "A" if parts["side"] == "A" else "B"
        return self._module(name, parts["path"].removeprefix(_PREFIX)), side, parts["adapter"]

    def _module(self, name: str, path: str) -> Module:
        prefix = self._spec.layer_prefix + "."
        number, _, rest = path.removeprefix(prefix).partition(".")
        known = rest in self._members and path.startswith(prefix)
        if not known or not _LAYER.fullmatch(number):
            raise self._error(name, self._why_refused(name))
        if int(number) >= self._spec.layers:
            raise self._error(name, f"wanted a layer below {self._spec.layers}, got layer {number}")
        return Module(int(number), path, self._members[rest])

    def _why_refused(self, name: str) -> str:
        for part, why in _KNOWN_REFUSALS:
            if part in name:
                return why
        known = ", ".join(sorted(self._members))
        return (
            f"wanted {self._spec.layer_prefix}.<layer>.<module>.lora_A.weight or .lora_B.weight "
            f"with a module of this model ({known})"
        )

    def _refuse_overlap(self, found: Iterable[Module]) -> None:
        owner: dict[tuple[int, str], Module] = {}
        for module in found:
            for member in module.members:
                other = owner.setdefault((module.layer, member.name), module)
                if other is not module:
                    raise self._error(
                        module.path, f"touches {member.name}, as {other.path} does already"
                    )

    def _pair(self, module: Module, sides: dict[SideName, str]) -> TensorPair:
        if "A" not in sides:
            raise self._error(sides["B"], "its lora_A partner is missing")
        if "B" not in sides:
            raise self._error(sides["A"], "its lora_B partner is missing")
        return TensorPair(module, sides["A"], sides["B"])

    def _error(self, item: str, reason: str) -> AdapterError:
        return AdapterError(self._file, item, reason)
