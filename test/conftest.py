"""What every test starts from: fixed seeds and none of our environment variables."""

import os
import random

import numpy as np
import pytest
import torch

_OUR_VARIABLES = ("GRAFT_", "SGLANG_GRAFT")


@pytest.fixture(autouse=True)
def _clean_start(monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    for name in list(os.environ):
        if name.startswith(_OUR_VARIABLES):
            monkeypatch.delenv(name)
