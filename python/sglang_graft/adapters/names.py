"""The grammar of tensor names: from a name in the file to one part of one module.

    [base_model.model.] [prefix.] layers.{layer}.{parent}.{module} PART
    PART = .lora_A|.lora_B [.adapter] .weight  |  .lora_B [.adapter] .bias
         | .lora_magnitude_vector [.adapter] [.weight]  |  .base_layer .weight|.bias

`module` is a linear of the spec, or the name of a fused group (qkv_proj, gate_up_proj) whose
outputs are the members' stacked. `prefix` is the model's own, or one that wrappers of the same
model write (`prefixes.py`).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sglang_graft.adapters.errors import AdapterError
from sglang_graft.adapters.prefixes import PrefixReader
from sglang_graft.adapters.spec import LinearSpec, ModelSpec

Part = Literal["A", "B", "bias", "magnitude"]

PEFT_PREFIX = "base_model.model."
# The shortest path wins, so that an adapter may itself be called "lora_B".
_NAME = re.compile(
    r"(?P<path>.+?)\.lora_"
    r"(?:(?P<part>A|B)(?:\.(?P<adapter>[^.]+))?\.(?P<kind>weight|bias)"
    r"|(?P<magnitude>magnitude_vector)(?:\.(?P<owner>(?!weight$)[^.]+))?(?:\.weight)?)"
)
_COPY = re.compile(r"(?P<path>.+)\.base_layer\.(?P<kind>weight|bias)")
_PARTS: dict[tuple[str, str], Part] = {
    ("A", "weight"): "A",
    ("B", "weight"): "B",
    ("B", "bias"): "bias",
}
# Modules outside the layers whose base weights may lie beside an adapter.
_OUTSIDE = ("lm_head", "embed_tokens")

# Substring of a name -> why it is refused; the first hit speaks.
_KNOWN_REFUSALS = (
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
    """A module that the file speaks of: one linear, or several that share a fused tensor.

    `path` is the file's spelling, `model_path` the served model's.
    """

    layer: int
    path: str
    model_path: str
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
class ModuleTensors:
    """The names of one module's tensors in the file; None for what it does not have."""

    module: Module
    a: str
    b: str
    bias: str | None
    magnitude: str | None


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """A tensor of the file that has to be a copy of the base model's.

    `layer` None and `linear` stand for what is outside the layers, as in `base.BaseWeight`.
    """

    name: str
    layer: int | None
    linears: tuple[str, ...]
    is_bias: bool


@dataclass(frozen=True, slots=True)
class Contents:
    """Every tensor of the file, by its use; modules ascend by layer and path."""

    modules: list[ModuleTensors]
    copies: list[BaseCopy]


class NameReader:
    """Maps the tensor names of one file onto the modules of `spec`."""

    def __init__(self, file: Path, spec: ModelSpec) -> None:
        self._file = file
        self._spec = spec
        self._members = {
            f"{members[0].parent}.{group}": members for group, members in spec.groups().items()
        }
        self._members |= {f"{linear.parent}.{linear.name}": (linear,) for linear in spec.linears}
        self._prefixes = PrefixReader(spec.layer_prefix, self._members)

    def contents(self, names: Iterable[str]) -> Contents:
        """What each tensor is.

        Raises AdapterError naming the tensor that fits nowhere, lacks its partner, or repeats what
        another tensor says.
        """
        found: dict[Module, dict[Part, str]] = {}
        adapters: dict[str | None, str] = {}
        copies: list[BaseCopy] = []
        for name in sorted(names):
            # LoRA first: an adapter may itself be called "base_layer".
            if not _NAME.fullmatch(name) and (copy := self._copy(name)) is not None:
                copies.append(copy)
                continue
            module, part, adapter = self._parse(name)
            adapters.setdefault(adapter, name)
            if len(adapters) > 1:
                first, second = adapters.values()
                raise self._error(second, f"names another adapter than {first} in the same file")
            if part in found.setdefault(module, {}):
                raise self._error(name, f"is the same matrix as {found[module][part]}")
            found[module][part] = name
        if not found:
            raise self._error("tensors", "wanted LoRA tensors of this model, got none")
        self._refuse_overlap(found)
        modules = [self._tensors(module, parts) for module, parts in found.items()]
        modules.sort(key=lambda tensors: (tensors.module.layer, tensors.module.path))
        return Contents(modules, copies)

    def _parse(self, name: str) -> tuple[Module, Part, str | None]:
        parts = _NAME.fullmatch(name)
        if parts is None:
            raise self._error(name, self._why_refused(name))
        if parts["magnitude"]:
            return self._module(name, parts["path"]), "magnitude", parts["owner"]
        part = _PARTS.get((parts["part"], parts["kind"]))
        if part is None:
            raise self._error(name, self._why_refused(name))
        return self._module(name, parts["path"]), part, parts["adapter"]

    def _copy(self, name: str) -> BaseCopy | None:
        parts = _COPY.fullmatch(name)
        if parts is None:
            return None
        is_bias = parts["kind"] == "bias"
        outside = parts["path"].rpartition(".")[2]
        if outside in _OUTSIDE:
            return BaseCopy(name, None, (outside,), is_bias)
        module = self._module(name, parts["path"])
        linears = tuple(member.name for member in module.members)
        return BaseCopy(name, module.layer, linears, is_bias)

    def _module(self, name: str, path: str) -> Module:
        path = path.removeprefix(PEFT_PREFIX)
        place = self._prefixes.split(path)
        if place is None:
            raise self._error(name, self._why_refused(name))
        if (other := self._prefixes.conflict(place, name)) is not None:
            raise self._error(name, f"has another path to its layers than {other}")
        if place.layer >= self._spec.layers:
            raise self._error(
                name, f"wanted a layer below {self._spec.layers}, got layer {place.layer}"
            )
        model_path = f"{self._spec.layer_prefix}.{place.layer}.{place.rest}"
        return Module(place.layer, path, model_path, self._members[place.rest])

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

    def _tensors(self, module: Module, parts: dict[Part, str]) -> ModuleTensors:
        some = next(iter(parts.values()))
        if "A" not in parts:
            raise self._error(parts.get("B", some), "its lora_A partner is missing")
        if "B" not in parts:
            raise self._error(parts["A"], "its lora_B partner is missing")
        return ModuleTensors(
            module, parts["A"], parts["B"], parts.get("bias"), parts.get("magnitude")
        )

    def _error(self, item: str, reason: str) -> AdapterError:
        return AdapterError(self._file, item, reason)
