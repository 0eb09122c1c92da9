"""The body of POST /load_lora_adapter."""

from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput


class LoadInput(LoadLoRAAdapterReqInput):
    """SGLang's body of POST /load_lora_adapter, and whether a loaded name may be replaced."""

    load_inplace: bool = False
