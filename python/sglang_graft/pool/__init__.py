"""The arena (one GPU allocation of equal pages) and the ledger of who owns each page."""

from sglang_graft.pool.arena import Arena
from sglang_graft.pool.layout import PageLayout, default_page_tokens
from sglang_graft.pool.ledger import Owner, PageLedger

__all__ = ["Arena", "Owner", "PageLayout", "PageLedger", "default_page_tokens"]
