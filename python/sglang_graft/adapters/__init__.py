"""LoRA adapters: PEFT folders, checked and packed into page-sized images for the arena."""

from sglang_graft.adapters.adapter import Adapter, Delta
from sglang_graft.adapters.errors import AdapterError
from sglang_graft.adapters.image import AdapterImage, pack
from sglang_graft.adapters.read import read_adapter
from sglang_graft.adapters.spec import LinearSpec, ModelSpec
from sglang_graft.adapters.table import PointerTable
from sglang_graft.adapters.tiles import TileMap, TileRange

__all__ = [
    "Adapter",
    "AdapterError",
    "AdapterImage",
    "Delta",
    "LinearSpec",
    "ModelSpec",
    "PointerTable",
    "TileMap",
    "TileRange",
    "pack",
    "read_adapter",
]
