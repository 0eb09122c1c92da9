"""The LoRA manager that SGLang's model runner builds, with the pool in place of slot buffers.

Target (0.5.17): class `lora.lora_manager.LoRAManager`. Reason: SGLang reads adapters with alpha/r
for every module and copies them padded into per-slot buffers; here they are read exactly, packed
at their true ranks and kept in the arena. Wrapping layers and the update protocol stay SGLang's.

SGLang builds the manager before the arena, so adapters named at start wait for `bind`.
"""

import logging
from pathlib import Path
from typing import Any

from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.lora.utils import LoRAType

from graft_kernels.sgmv import Slice
from sglang_graft import config
from sglang_graft.adapters import Adapter, ModelSpec, PointerTable, TileMap, read_adapter
from sglang_graft.adapters.location import check_size
from sglang_graft.engine.base_weights import base_weight_reader
from sglang_graft.engine.hooks import Hook
from sglang_graft.engine.lora_backend import GraftLoRABackend, WeightRef
from sglang_graft.engine.model_spec import model_spec
from sglang_graft.engine.pool import Pool
from sglang_graft.tiers import Residency

logger = logging.getLogger(__name__)


class WeightRefs:
    """What SGLang takes for its LoRA memory pool: it hands out WeightRefs instead of tensors."""

    def __init__(self, spec: ModelSpec, slots: int, rank: int, device: Any) -> None:
        self.max_loras_per_batch = slots
        self.target_modules = set(spec.groups())
        self._refs: dict[tuple[str, int, LoRAType], WeightRef] = {}
        for group, linears in spec.groups().items():
            out = sum(linear.out_features for linear in linears)
            shape_a = (slots, len(linears) * rank, linears[0].in_features)
            shape_b = (slots, out, rank)
            for layer in range(spec.layers):
                for kind, shape in ((LoRAType.LORA_A, shape_a), (LoRAType.LORA_B, shape_b)):
                    self._refs[group, layer, kind] = WeightRef(layer, group, shape, device)

    def get_tensor(self, target_module: str, layer_id: int, lora_type: LoRAType) -> WeightRef:
        """The reference that stands for one layer's A or B buffer."""
        return self._refs[target_module, layer_id, lora_type]

    def bind(self, tile_map: TileMap) -> None:
        """Give every reference its tiles."""
        for ref in self._refs.values():
            ref.bind(tile_map)

    def projections(self) -> list[tuple[Slice, ...]]:
        """The stacked linears of each projection of the first layer."""
        return [
            ref.slices
            for (_, layer, kind), ref in self._refs.items()
            if layer == 0 and kind is LoRAType.LORA_A
        ]


class GraftLoRAManager(LoRAManager):
    """Reads, registers and activates adapters for one model runner."""

    lora_backend: GraftLoRABackend
    residency: Residency

    def init_state(
        self, max_lora_rank: int, target_modules: set[str], lora_paths: list[LoRARef] | None
    ) -> None:
        """Wrap the model's linears and read the adapters that were named at start."""
        self.max_lora_rank = max_lora_rank
        self.lora_refs: dict[str, LoRARef] = {}
        self.num_pinned_loras = 0
        self.spec = model_spec(
            self.base_model, target_modules, self.dtype, self.base_hf_config.vocab_size
        )
        self.target_modules = set(self.spec.groups())
        self.base_weight = base_weight_reader(self.base_model, self.spec)
        self.init_lora_modules()
        self.memory_pool = WeightRefs(
            self.spec, self.max_loras_per_batch, max_lora_rank, self.device
        )
        self.update_lora_info()
        self._read_at_start: list[tuple[LoRARef, Adapter]] = [
            (ref, self._read(ref)) for ref in lora_paths or []
        ]

    def bind(self, pool: Pool) -> None:
        """The arena exists: fix the tile geometry and register the adapters read at start."""
        page_bytes = pool.layout.page_bytes
        tile_map = TileMap(self.spec, page_bytes, max_rank=self.max_lora_rank)
        # One slot more than distinct ids in a batch, because slot 0 is always the base model.
        table = PointerTable(self.max_loras_per_batch + 1, tile_map, self.device)
        self.residency = Residency(
            tree=pool.tree,
            arena=pool.arena,
            tile_map=tile_map,
            table=table,
            pin=self.device.type == "cuda",
        )
        self.memory_pool.bind(tile_map)
        self.lora_backend.bind(
            table, pool.arena.buffer, self.memory_pool.projections(), self.max_lora_rank
        )
        for ref, adapter in self._read_at_start:
            self._register(ref, adapter)
        self._read_at_start = []

    def _load_lora_adapter(self, lora_ref: LoRARef) -> Any:
        try:
            _check_count(len(self.lora_refs))
            self._register(lora_ref, self._read(lora_ref))
        except (ValueError, OSError, RuntimeError, MemoryError) as error:
            # The last two: no host memory left, pinned or not. Nothing was registered.
            return self.create_lora_update_result(success=False, error_message=str(error))
        return self.create_lora_update_result(success=True)

    def _load_lora_adapter_from_tensors(self, lora_ref: LoRARef, *_: Any) -> Any:
        return self.create_lora_update_result(
            success=False,
            error_message=f"adapter {lora_ref.lora_name}: loading from tensors is not supported by"
            " Graft yet; save it as a PEFT folder and use /load_lora_adapter",
        )

    def _unload_lora_adapter(self, lora_ref: LoRARef) -> Any:
        if self.lora_refs.pop(lora_ref.lora_id, None) is None:
            return self.create_lora_update_result(
                success=False, error_message=f"adapter {lora_ref.lora_name} is not loaded"
            )
        freed = self.residency.remove(lora_ref.lora_id)
        logger.info("Adapter %s unloaded, %d pages freed", lora_ref.lora_name, freed)
        return self.create_lora_update_result(success=True)

    def validate_lora_batch(self, lora_ids: set[str | None]) -> bool:
        """Whether a batch of these adapters has slots enough; pages are the admission hook's."""
        return len(lora_ids) <= self.max_loras_per_batch

    def fetch_new_loras(
        self,
        new_loras: set[str | None],
        running_loras: set[str | None] = frozenset(),  # type: ignore[assignment]
    ) -> None:
        """Nothing: `prepare_lora_batch`, which SGLang calls next, brings adapters and slots."""

    def prepare_lora_batch(self, forward_batch: Any) -> None:
        """On the forward's stream: finish loads, assign slots, and describe the rows."""
        ids = forward_batch.lora_ids
        if any(ids):
            slot_of = self.residency.activate(ids)
            slots = [slot_of[lora_id] for lora_id in ids]
        else:
            slots = [0] * len(ids)
        extend = forward_batch.forward_mode.is_extend()
        lengths = forward_batch.extend_seq_lens_cpu if extend else [1] * len(ids)
        self.lora_backend.set_batch(slots, list(lengths), decode=not extend)

    def _read(self, ref: LoRARef) -> Adapter:
        if ref.pinned:
            raise ValueError(
                f"adapter {ref.lora_name}: pinned adapters are not supported by Graft yet; load it"
                ' with "pinned": false'
            )
        check_size(Path(ref.lora_path), _options().max_adapter_mb * 2**20)
        adapter = read_adapter(Path(ref.lora_path), self.spec, self.base_weight)
        for warning in adapter.warnings:
            logger.warning("Adapter %s: %s", ref.lora_name, warning)
        return adapter

    def _register(self, ref: LoRARef, adapter: Adapter) -> None:
        if any(ref.lora_name == other.lora_name for other in self.lora_refs.values()):
            raise ValueError(f"adapter {ref.lora_name} is already loaded; unload it first")
        known = self.residency.add(ref.lora_id, ref.lora_name, adapter)
        self.lora_refs[ref.lora_id] = ref
        logger.info(
            "Adapter %s: %d pages, largest rank %d, identity %s",
            ref.lora_name,
            known.node.weight_pages,
            adapter.max_rank,
            adapter.identity[:12],
        )


def _check_count(loaded: int) -> None:
    most = _options().max_adapters
    if loaded >= most:
        raise ValueError(
            f"{loaded} adapters are loaded, wanted at most {most}: unload one, or raise"
            " --graft-max-adapters"
        )


def _options() -> config.GraftConfig:
    options = config.published()
    assert options is not None, "adapters are loaded, but no options were published"
    return options


HOOKS = (
    Hook(
        target="sglang.srt.lora.lora_manager.LoRAManager",
        kind="replace",
        function=GraftLoRAManager,
        parameters=(
            "base_model",
            "base_hf_config",
            "max_loras_per_batch",
            "load_config",
            "dtype",
            "server_args",
            "lora_backend",
            "tp_size",
            "tp_rank",
            "max_lora_rank",
            "target_modules",
            "lora_paths",
        ),
        reason="adapters are read exactly and live in the arena",
    ),
)
