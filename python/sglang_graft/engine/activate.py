"""Entry point `sglang.srt.plugins: graft`, which SGLang runs in the main and scheduler processes.

Without `--enable-graft` only the flags appear; nothing else of SGLang is touched.
"""

import multiprocessing
import os

from sglang_graft import SGLANG_VERSION, config
from sglang_graft.engine.hooks import HookError, register

_PROBE_ENV = "GRAFT_STOCK_PROBE"


def check_version() -> None:
    """Raise HookError when another SGLang than the pinned one is installed."""
    import sglang

    if sglang.__version__ != SGLANG_VERSION:
        raise HookError(
            f"Graft needs sglang=={SGLANG_VERSION}, got {sglang.__version__};"
            f" pip install sglang=={SGLANG_VERSION}"
        )


def activate() -> None:
    """Register what this process needs.

    SGLang logs an exception of a plugin and starts without it. Where Graft was asked for by its
    environment variable, or by the parent process, nothing later would notice: so end here.
    """
    try:
        _register()
    except Exception as error:
        if config.published() is not None or config.resolve({}, os.environ).enable:
            raise SystemExit(f"Graft refuses to start: {error}") from error
        raise


def _register() -> None:
    check_version()
    from sglang_graft.engine import flags

    flags.add_backend_choice()
    register(flags.HOOKS)
    in_child = multiprocessing.parent_process() is not None
    if in_child and config.published() is not None:
        # A child of a server that has Graft on. Imported here, because it imports the scheduler.
        from sglang_graft.engine import scheduler

        scheduler.install()
    elif in_child and os.environ.get(_PROBE_ENV) == "1":
        # Only reads and counts, for comparisons. Imports SGLang's scheduler as well.
        from sglang_graft.engine import stock_probe

        register(stock_probe.HOOKS)
