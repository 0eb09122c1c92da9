"""The LoRA manager that SGLang's model runner builds, with the pool in place of slot buffers.

Target (0.5.17): class `lora.lora_manager.LoRAManager`. Reason: SGLang reads adapters with alpha/r
for every module and copies them padded into per-slot buffers; here they are read exactly, packed
at their true ranks and kept in the arena. Wrapping layers and the update protocol stay SGLang's.

SGLang builds the manager before the arena, so the reading of adapters named at start begins in
`bind` (`start_adapters`).

A name that is loaded again is replaced: the new registration is complete before the old one
retires, so a bad file changes nothing. Whether a replacement was asked for is checked where names
live, in `serving/load`.
"""

import logging
import time
from pathlib import Path
from typing import Any

import torch
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.lora.utils import LoRAType

from graft_kernels.sgmv import Slice
from sglang_graft import config
from sglang_graft.adapters import (
    Adapter,
    BaseWeight,
    ModelSpec,
    PointerTable,
    TileMap,
    pack,
    read_adapter,
)
from sglang_graft.adapters.location import check_size
from sglang_graft.engine.base_weights import base_weight_reader
from sglang_graft.engine.freed import Freed
from sglang_graft.engine.hooks import Hook
from sglang_graft.engine.lora_backend import GraftLoRABackend, WeightRef
from sglang_graft.engine.model_spec import model_spec
from sglang_graft.engine.pool import Pool
from sglang_graft.engine.start import stop_at_end
from sglang_graft.engine.start_adapters import ReadAdapter, StartAdapters
from sglang_graft.engine.tiers import make_tiers
from sglang_graft.tiers import Packed, Residency, Tiers

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


# What a folder can be wrong in; the last two: no host memory left.
READ_ERRORS = (ValueError, OSError, RuntimeError, MemoryError)


class GraftLoRAManager(LoRAManager):
    """Reads, registers and activates adapters for one model runner."""

    lora_backend: GraftLoRABackend
    residency: Residency
    tiers: Tiers
    at_start: StartAdapters

    def init_state(
        self, max_lora_rank: int, target_modules: set[str], lora_paths: list[LoRARef] | None
    ) -> None:
        """Wrap the model's linears; adapters named at start are read once the arena exists."""
        self.max_lora_rank = max_lora_rank
        self.lora_refs: dict[str, LoRARef] = {}
        self.spec = model_spec(
            self.base_model, target_modules, self.dtype, self.base_hf_config.vocab_size
        )
        self.target_modules = set(self.spec.groups())
        self.base_weight = self._in_any_thread(base_weight_reader(self.base_model, self.spec))
        self.init_lora_modules()
        self.memory_pool = WeightRefs(
            self.spec, self.max_loras_per_batch, max_lora_rank, self.device
        )
        self.update_lora_info()
        self._named_at_start = list(lora_paths or [])

    def bind(self, pool: Pool) -> None:
        """The arena exists: fix the tile geometry and begin to read the adapters named at start."""
        page_bytes = pool.layout.page_bytes
        tile_map = TileMap(self.spec, page_bytes, max_rank=self.max_lora_rank)
        # One slot more than distinct ids in a batch, because slot 0 is always the base model.
        table = PointerTable(self.max_loras_per_batch + 1, tile_map, self.device)
        self.residency = Residency(
            tree=pool.tree,
            arena=pool.arena,
            tile_map=tile_map,
            table=table,
        )
        self.tiers = make_tiers(pool, self.residency, self._read_again)
        self.memory_pool.bind(tile_map)
        named, self._named_at_start = self._named_at_start, []
        # Begun before, since this compiles kernels.
        self.at_start = StartAdapters(
            named, self.base_weight, self.read, self.register, self.tiers.images.store
        )
        stop_at_end(self.at_start.stop)
        self.lora_backend.bind(
            table, pool.arena.buffer, self.memory_pool.projections(), self.max_lora_rank
        )
        pool.host.wait()
        self.at_start.register_ready()

    def _in_any_thread(self, base_weight: BaseWeight) -> BaseWeight:
        """A thread begins with device 0, where any CUDA call would make a context.

        Nothing but base weights brings a thread that reads adapters to the device.
        """
        device = self.device
        if device.type != "cuda":
            return base_weight

        def read(layer: int | None, linear: str) -> tuple[torch.Tensor, torch.Tensor | None]:
            torch.cuda.set_device(device)
            return base_weight(layer, linear)

        return read

    def _load_lora_adapter(self, lora_ref: LoRARef) -> Any:
        try:
            return self.finish_load(lora_ref, self.read(lora_ref))
        except READ_ERRORS as error:
            return self.failed(error)

    def read(self, ref: LoRARef, base_weight: BaseWeight | None = None) -> ReadAdapter:
        """Read and pack the adapter's folder. Raises READ_ERRORS. Any thread may call it."""
        start = time.perf_counter()
        adapter = self._read(Path(ref.lora_path), base_weight)
        for warning in adapter.warnings:
            logger.warning("Adapter %s: %s", ref.lora_name, warning)
        image = pack(adapter, self.residency.tile_map)
        return ReadAdapter(adapter, image, time.perf_counter() - start)

    def _read_again(self, path: Path) -> Packed:
        """A registered adapter whose image has left the host pool; its warnings were given."""
        adapter = self._read(path)
        return Packed.of(adapter, pack(adapter, self.residency.tile_map))

    def _read(self, path: Path, base_weight: BaseWeight | None = None) -> Adapter:
        check_size(path, _options().max_adapter_mb * 2**20)
        return read_adapter(path, self.spec, base_weight or self.base_weight)

    def finish_load(self, ref: LoRARef, read: ReadAdapter) -> Any:
        """Register what was read, in place of an adapter of the same name; SGLang's answer."""
        try:
            self._check_count(ref)
            freed = self.register(ref, read)
        except READ_ERRORS as error:
            return self.failed(error)
        return self.create_lora_update_result(success=True, error_message=freed.to_text())

    def failed(self, error: BaseException) -> Any:
        """SGLang's answer to a load that changed nothing."""
        return self.create_lora_update_result(success=False, error_message=str(error))

    def _load_lora_adapter_from_tensors(self, lora_ref: LoRARef, *_: Any) -> Any:
        return self.create_lora_update_result(
            success=False,
            error_message=f"adapter {lora_ref.lora_name}: loading from tensors is not supported by"
            " Graft yet; save it as a PEFT folder and use /load_lora_adapter",
        )

    def _unload_lora_adapter(self, lora_ref: LoRARef) -> Any:
        """The first call retires an adapter, the second forgets it: its last request has ended."""
        known = self.lora_refs.pop(lora_ref.lora_id, None)
        if known is not None:
            freed = self._retire(known)
        elif self.residency.is_known(lora_ref.lora_id):
            freed = Freed(self.residency.remove(lora_ref.lora_id), 0, self._page_bytes)
        else:
            return self.create_lora_update_result(
                success=False, error_message=f"adapter {lora_ref.lora_name} is not loaded"
            )
        return self.create_lora_update_result(success=True, error_message=freed.to_text())

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
        """On the forward's stream: set fences, assign slots, and describe the rows."""
        self.tiers.before_forward()
        ids = forward_batch.lora_ids
        if any(ids):
            slot_of = self.residency.activate(ids)
            slots = [slot_of[lora_id] for lora_id in ids]
        else:
            slots = [0] * len(ids)
        extend = forward_batch.forward_mode.is_extend()
        lengths = forward_batch.extend_seq_lens_cpu if extend else [1] * len(ids)
        self.lora_backend.set_batch(slots, list(lengths), decode=not extend)

    def register(self, ref: LoRARef, read: ReadAdapter) -> Freed:
        """Make an adapter usable; what the one that had its name gives back.

        ValueError, with nothing changed, when it does not fit or cannot be pinned.
        """
        old = next((r for r in self.lora_refs.values() if r.lora_name == ref.lora_name), None)
        residency = self.residency
        self.tiers.rates.meter.disk(read.image.pages.numel(), read.seconds)
        known = residency.add(ref.lora_id, ref.lora_name, read.adapter, read.image)
        if ref.pinned:
            try:
                self._pin(ref, old)
            except ValueError:
                residency.remove(ref.lora_id)
                raise
        self.lora_refs[ref.lora_id] = ref
        logger.info(
            "Adapter %s: %d pages, largest rank %d, identity %s",
            ref.lora_name,
            known.node.weight_pages,
            read.adapter.max_rank,
            read.adapter.identity[:12],
        )
        if old is None:
            return Freed(0, 0, self._page_bytes)
        before = next(k for k in residency.known() if k.adapter_id == old.lora_id)
        residency.prioritize(ref.lora_id, before.priority)
        del self.lora_refs[old.lora_id]
        return self._retire(old)

    def _check_count(self, ref: LoRARef) -> None:
        names = {other.lora_name for other in self.lora_refs.values()}
        most = _options().max_adapters
        if ref.lora_name not in names and len(names) >= most:
            raise ValueError(
                f"{len(names)} adapters are loaded, wanted at most {most}: unload one, or raise"
                " --graft-max-adapters"
            )

    def _pin(self, ref: LoRARef, old: LoRARef | None) -> None:
        replaced = None if old is None else old.lora_id
        if not self.residency.pin_adapter(ref.lora_id, instead_of=replaced):
            tree = self.residency.tree
            node = self.residency.node(ref.lora_id)
            assert node is not None
            raise ValueError(
                f"adapter {ref.lora_name}: no room to pin {node.weight_pages} pages now,"
                f" {tree.ledger.free + tree.evictable} are free or evictable and running requests"
                ' hold the others; try again later, or load it with "pinned": false'
            )

    def _retire(self, ref: LoRARef) -> Freed:
        now = self.residency.retire(ref.lora_id)
        freed = Freed(now, self.residency.held_pages(ref.lora_id), self._page_bytes)
        logger.info("Adapter %s retired: %s", ref.lora_name, freed)
        return freed

    @property
    def _page_bytes(self) -> int:
        return self.residency.arena.layout.page_bytes


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
