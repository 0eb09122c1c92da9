"""DoRA magnitudes and LoRA biases as vectors over the outputs of a linear.

For a base linear `W x + c`, PEFT computes (0.21.2, `lora/dora.py` and `lora/layer.py`)

    DoRA        n * (W x + s B A x) + c,    n = magnitude / ||W + s B A||, the norm of each row
    lora_bias   W x + c + s (B A x + d)

In the served form `(W x + c + s B A x) * mul + add` that is `mul = n` and `add = c * (1 - n)`, or
`add = s d`. PEFT allows one of the two, not both.
"""

from dataclasses import replace

import torch

from sglang_graft.adapters.adapter import Delta

# A block of rows of W, in numbers: float32 copies of it are all that is alive at once.
_BLOCK = 1 << 22


def with_bias(delta: Delta, bias: torch.Tensor) -> Delta:
    """`delta` with the bias of lora_B, float32 `[out_features]`."""
    return replace(delta, bias=bias, add=bias * delta.scale)


def with_dora(delta: Delta, weight: torch.Tensor, base_bias: torch.Tensor | None) -> Delta:
    """`delta`, which has a magnitude, with the vectors that follow from the base weights.

    `weight` is `[out_features, in_features]` and stays on its device. A row whose norm is 0 makes
    `mul` infinite or NaN, as in PEFT; that is the caller's to refuse.
    """
    assert delta.magnitude is not None
    mul = delta.magnitude / row_norms(weight, delta)
    add = None if base_bias is None else base_bias.detach().float().cpu() * (1 - mul)
    return replace(delta, mul=mul, add=add)


def row_norms(weight: torch.Tensor, delta: Delta) -> torch.Tensor:
    """`||W + scale * B A||` of each row: float32 `[out_features]` on the CPU.

    Computed on the device of `weight`, in float32, from A and B as they are applied. Memory: two
    blocks of rows, however large `weight` is.
    """
    out_features, in_features = weight.shape
    a, norms = delta.a.to(weight.device, torch.float32), []
    rows = max(1, _BLOCK // in_features)
    for start in range(0, out_features, rows):
        block = weight[start : start + rows].detach().float()
        b = delta.b[start : start + rows].to(weight.device, torch.float32)
        norms.append(torch.linalg.vector_norm(block + delta.scale * (b @ a), dim=1).cpu())
    return torch.cat(norms)
