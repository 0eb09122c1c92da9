"""The one allocation that holds prefix KV and adapter weights alike."""

from collections.abc import Sequence

import numpy as np
import torch

from sglang_graft.pool.layout import PageLayout


class Arena:
    """`pages` equal pages of one `uint8` tensor, `buffer` `[pages * page_bytes]`, on `device`.

    The memory starts as zeros and not as whatever was there: attention multiplies masked rows by
    zero, and zero times a leftover NaN would reach an output. Page 0 is the sink that takes the
    writes of padded tokens.
    """

    def __init__(self, layout: PageLayout, pages: int, device: torch.device | str) -> None:
        if pages < 2:
            raise ValueError(f"arena: wanted at least 2 pages (the sink and one more), got {pages}")
        self.layout = layout
        self.pages = pages
        self.buffer = _zeros(pages * layout.page_bytes, torch.device(device))
        self._by_page = self.buffer.view(pages, layout.page_bytes)

    @property
    def base_address(self) -> int:
        """Address of page 0; page p starts `p * page_bytes` later."""
        return self.buffer.data_ptr()

    def key_view(self, layer: int) -> torch.Tensor:
        """K of one layer, `[rows, kv_heads, head_dim]`, contiguous; row = dense id. Shares memory.

        Only the first `page_tokens` of every `ids_per_page` rows are this layer's K. The rows
        between them belong to V and to other layers, so index the view only by dense ids.
        """
        return self._rows_from(2 * layer, layer)

    def value_view(self, layer: int) -> torch.Tensor:
        """V of one layer; like `key_view`."""
        return self._rows_from(2 * layer + 1, layer)

    def page_view(self, page: int) -> torch.Tensor:
        """The bytes of one page, uint8 `[page_bytes]`. Shares memory."""
        assert 0 <= page < self.pages, f"page {page} is outside of the arena's 0..{self.pages - 1}"
        return self._by_page[page]

    def write(self, pages: Sequence[int], image: torch.Tensor) -> None:
        """Copy row i of `image` into page `pages[i]`, each by one copy on the current stream.

        `image` is uint8 `[len(pages), page_bytes]` on any device. The copies do not block: an image
        in pinned memory must stay unchanged until the stream has passed them.
        """
        wanted = (len(pages), self.layout.page_bytes)
        if image.dtype != torch.uint8 or tuple(image.shape) != wanted:
            raise ValueError(
                f"page image: wanted uint8 {list(wanted)} for {len(pages)} pages, "
                f"got {image.dtype} {list(image.shape)}"
            )
        for page, source in zip(pages, image.unbind(0), strict=True):
            assert page != 0, "page 0 is the sink and holds no image"
            self.page_view(page).copy_(source, non_blocking=True)

    def _rows_from(self, strip: int, layer: int) -> torch.Tensor:
        """The view that starts at strip `strip` of page 0; a strip is `page_tokens` rows."""
        layout = self.layout
        if not 0 <= layer < layout.layers:
            raise ValueError(f"layer: wanted 0..{layout.layers - 1}, got {layer}")
        rows = layout.rows(self.pages)
        start = strip * layout.page_tokens * layout.row_bytes
        strip_bytes = self.buffer[start : start + rows * layout.row_bytes]
        return strip_bytes.view(layout.dtype).view(rows, layout.kv_heads, layout.head_dim)


def _zeros(nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        # The system zeroes these pages when they are first touched. torch would touch all of them
        # now: gigabytes of a machine's memory, and half a minute, for a pool that may stay small.
        return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)
