"""The parts of SGLang's tokenizer manager that loads and unloads touch, with a scheduler's."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.io_struct import LoRAUpdateOutput, UnloadLoRAAdapterReqInput

from sglang_graft.engine import control
from sglang_graft.engine.freed import Freed
from sglang_graft.serving.load import load
from sglang_graft.serving.load_input import LoadInput
from sglang_graft.serving.registry import GraftRegistry
from sglang_graft.serving.unload import unload

PAGES = 5


class Manager:
    """Records what the scheduler was told; `broken` paths fail to load."""

    served_model_name = "base"
    server_args = SimpleNamespace(model_path="models/base")

    def __init__(self) -> None:
        ref = LoRARef(lora_name="legal", lora_path="v1")
        self.lora_registry = GraftRegistry([ref])
        self.lora_ref_cache = {"legal": ref}
        self.lora_update_lock = asyncio.Lock()
        self.rid_to_state: dict[str, Any] = {}
        self.paths = {ref.lora_id: "v1"}
        self._message = asyncio.Lock()
        self.reading: asyncio.Event | None = None
        """Loads wait for it, as for a slow disk."""
        self.retired: list[str] = []
        self.forgotten: list[str] = []

    def auto_create_handle_loop(self) -> None:
        pass

    async def get_internal_state_communicator(self, message: Any) -> list[Any]:
        """A scheduler that takes its time, and answers one after the other."""
        async with self._message:
            await asyncio.sleep(0.01)
            operation, asked = json.loads(message.rid.removeprefix(control.PREFIX))
            reply = self.operation(operation, asked)
            return [SimpleNamespace(internal_state={control.REPLY: reply})]

    def operation(self, operation: str, asked: dict[str, Any]) -> dict[str, Any]:
        assert operation == "unload_adapter"
        freed, held = Freed(0, 0, 100), self.busy(asked["id"])
        if asked["id"] in self.paths:
            self.retired.append(self.paths.pop(asked["id"]))
            freed = Freed(0 if held else PAGES, PAGES if held else 0, 100)
        else:
            assert not held, "forgotten while a request needs it"
            self.forgotten.append(asked["name"])
        return {"freed": freed.to_text()}

    async def update_lora_adapter_communicator(self, obj: Any) -> list[LoRAUpdateOutput]:
        """A disk that takes its time."""
        await asyncio.sleep(0.01)
        if self.reading is not None:
            await self.reading.wait()
        freed = Freed(0, 0, 100)
        if obj.lora_path == "broken":
            return [LoRAUpdateOutput(success=False, error_message="it is broken")]
        assert obj.lora_id is not None
        old = next((i for i, r in self.names().items() if r == obj.lora_name), None)
        self.paths[obj.lora_id] = obj.lora_path
        if old is not None:
            self.retired.append(self.paths.pop(old))
            freed = Freed(0, PAGES, 100) if self.busy(old) else Freed(PAGES, 0, 100)
        return [LoRAUpdateOutput(success=True, error_message=freed.to_text())]

    def names(self) -> dict[str, str]:
        refs = self.lora_registry.get_all_adapters().values()
        return {ref.lora_id: ref.lora_name for ref in refs if ref.lora_id in self.paths}

    def busy(self, adapter_id: str) -> bool:
        return any(s.obj.lora_id == adapter_id for s in self.rid_to_state.values())

    def request(self, rid: str, adapter_id: str | None) -> None:
        self.rid_to_state[rid] = SimpleNamespace(obj=SimpleNamespace(lora_id=adapter_id))

    async def original_load(self, obj: Any, _: Any) -> Any:
        async with self.lora_update_lock:
            ref = LoRARef(lora_name=obj.lora_name, lora_path=obj.lora_path, pinned=obj.pinned)
            obj.lora_id = ref.lora_id
            (result,) = await self.update_lora_adapter_communicator(obj)
            if result.success:
                await self.lora_registry.register(ref)
                self.lora_ref_cache[obj.lora_name] = ref
            return result

    async def load(self, name: str, path: str, *, inplace: bool = False) -> Any:
        obj = LoadInput(lora_name=name, lora_path=path, load_inplace=inplace)
        return await asyncio.wait_for(load(Manager.original_load, self, obj), timeout=10)

    async def unload(self, name: str) -> Any:
        request = UnloadLoRAAdapterReqInput(lora_name=name)
        return await asyncio.wait_for(unload(Manager.original_load, self, request), timeout=10)

    async def reaped(self) -> None:
        """Until every retired adapter is forgotten."""
        assert self.lora_registry.reaper is not None
        await asyncio.wait_for(self.lora_registry.reaper, timeout=10)
