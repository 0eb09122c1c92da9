"""Tenants: keys, what each may use, and how much. Knows neither SGLang nor the pool."""

from sglang_graft.tenants.bucket import Bucket
from sglang_graft.tenants.file import MAX_BYTES, Tenant, TenantsError, check, parse, read
from sglang_graft.tenants.keys import key_id, make_key, matches
from sglang_graft.tenants.meter import Meter
from sglang_graft.tenants.table import TenantTable

__all__ = [
    "MAX_BYTES",
    "Bucket",
    "Meter",
    "Tenant",
    "TenantTable",
    "TenantsError",
    "check",
    "key_id",
    "make_key",
    "matches",
    "parse",
    "read",
]
