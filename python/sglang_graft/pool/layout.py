"""Where the K and V of a token lie: the bytes of a page and the dense ids that index them.

    page:  [layer 0 K | layer 0 V | layer 1 K | layer 1 V | ...]   each page_tokens * row_bytes

Two neighbouring pages are `ids_per_page` rows apart, in every layer and for K and V alike. So a
layer's K is one plain contiguous tensor that starts inside page 0, and one dense id,
`page * ids_per_page + offset`, finds a token in all layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

IdArray = npt.NDArray[np.int64]

_WANTED_PAGE_BYTES = 2 << 20
_PAGE_TOKENS_CHOICES = (16, 32, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageLayout:
    """The shape of a page. `dtype` is what K and V are stored in; sizes are counts, all above 0."""

    layers: int
    page_tokens: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("layers", "page_tokens", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"PageLayout.{name}: wanted at least 1, got {getattr(self, name)}")

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of K (= V) of one token in one layer."""
        return self.kv_heads * self.head_dim * self.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V of `page_tokens` tokens in all layers."""
        return self.ids_per_page * self.row_bytes

    @property
    def ids_per_page(self) -> int:
        """Dense ids from one page to the next; a page uses the first `page_tokens` of them."""
        return 2 * self.layers * self.page_tokens

    def rows(self, pages: int) -> int:
        """Rows of one layer's K or V view over an arena of `pages` pages."""
        return (pages - 1) * self.ids_per_page + self.page_tokens

    def dense_ids(self, pages: Sequence[int] | IdArray) -> IdArray:
        """The ids of all tokens of `pages`, page by page: int64 `[len(pages) * page_tokens]`."""
        first = np.asarray(pages, dtype=np.int64) * self.ids_per_page
        offsets = np.arange(self.page_tokens, dtype=np.int64)
        return (first[:, None] + offsets).reshape(-1)

    def page_numbers(self, ids: IdArray) -> IdArray:
        """The page of each dense id, in the shape of `ids`."""
        return ids // self.ids_per_page

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens, the last one perhaps in part."""
        return -(-tokens // self.page_tokens)

    def pages_for_bytes(self, n: int) -> int:
        """Pages that hold `n` bytes, the last one perhaps in part."""
        return -(-n // self.page_bytes)


def default_page_tokens(*, layers: int, row_bytes: int) -> int:
    """Tokens a page when the user does not choose: the power of two in 16..64 nearest to 2 MiB.

    2 MiB is large enough that copying one page runs at the speed of the bus. Of two sizes equally
    near, the smaller wins: it wastes less on short prompts.
    """

    def distance(tokens: int) -> tuple[int, int]:
        return abs(2 * layers * tokens * row_bytes - _WANTED_PAGE_BYTES), tokens

    return min(_PAGE_TOKENS_CHOICES, key=distance)
