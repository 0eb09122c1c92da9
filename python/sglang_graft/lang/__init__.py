"""Adapters in programs of SGLang's frontend language.

    import sglang as sgl
    from sglang_graft import lang

    sgl.set_default_backend(lang.Endpoint("http://127.0.0.1:30000"))

    @sgl.function
    def review(s, text):
        s += sgl.user(text)
        with lang.adapter("legal"):
            s += sgl.assistant(sgl.gen("opinion"))
        s += sgl.user("Put it simply.")
        s += sgl.assistant(lang.adapter("sales")(sgl.gen("summary")))

    review.run(text="...")
    review.run_batch([{"text": "..."}], adapter="legal")

The import adds the option `adapter` to `run` and `run_batch`; programs that choose no adapter run
as before.
"""

from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_graft.engine.hooks import register, verify
from sglang_graft.lang import executor, programs
from sglang_graft.lang.choice import adapter, current
from sglang_graft.lang.endpoint import Endpoint

__all__ = ["Endpoint", "adapter", "current"]

HOOKS = (*programs.HOOKS, *executor.HOOKS)

register(HOOKS)
HookRegistry.apply_hooks()
verify(HOOKS)
