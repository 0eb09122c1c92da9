"""What a start with a tenants file needs, and what it cannot be combined with."""

import os
from pathlib import Path
from typing import Any

from sglang_graft.tenants import Tenant, TenantsError, read

_REFUSED = {
    "api_key": "every tenant has a key of its own in the file; give that one to a tenant",
    "is_embedding": "SGLang gives an embedding request nothing that could carry its tenant",
    "enable_custom_logit_processor": "it runs code that a request brings",
}


def check(path: str, server_args: Any) -> dict[str, Tenant]:
    """The tenants of the file. ValueError names the flag, or the file with tenant and field."""
    for field, reason in _REFUSED.items():
        if getattr(server_args, field):
            flag = "--" + field.replace("_", "-")
            raise ValueError(f"--graft-tenants cannot be combined with {flag}: {reason}.")
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes"):
        raise ValueError(
            "--graft-tenants cannot be combined with SGLANG_RUST_SERVER: it has no keys"
        )
    if not server_args.admin_api_key:
        raise ValueError(
            "--graft-tenants wants --admin-api-key: without it tenants could operate the server"
        )
    try:
        tenants = read(Path(path))
    except TenantsError as error:
        raise ValueError(f"--graft-tenants: {error}") from None
    return tenants
