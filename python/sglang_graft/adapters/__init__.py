"""LoRA adapters: PEFT folders, checked and packed into page-sized images for the arena."""

from sglang_graft.adapters.adapter import Adapter, Delta
from sglang_graft.adapters.base import BaseWeight, NoBaseWeight
from sglang_graft.adapters.errors import AdapterError
from sglang_graft.adapters.image import AdapterImage, measure, pack
from sglang_graft.adapters.read import read_adapter
from sglang_graft.adapters.spec import LinearSpec, ModelSpec
from sglang_graft.adapters.table import PointerTable
from sglang_graft.adapters.tiles import TileMap, TileRange, VectorRange

__all__ = [
    "Adapter",
    "AdapterError",
    "AdapterImage",
    "BaseWeight",
    "Delta",
    "LinearSpec",
    "ModelSpec",
    "NoBaseWeight",
    "PointerTable",
    "TileMap",
    "TileRange",
    "VectorRange",
    "measure",
    "pack",
    "read_adapter",
]
