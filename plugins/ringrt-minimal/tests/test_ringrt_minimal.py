"""The contract of a backend, check by check, and what this one refuses."""

from __future__ import annotations

import numpy as np
import pytest

import ringrt
from ringrt.conformance import backend_checks
from ringrt.errors import Unsupported


@pytest.mark.parametrize("check", backend_checks("minimal"), ids=str)
def test_the_contract(check):
    check()


def test_what_it_does_not_do_is_refused_by_name():
    x = np.ones((1, 6, 2, 8), np.float32)
    with pytest.raises(Unsupported, match="backend minimal: softcap is not implemented"):
        ringrt.attention(x, x, x, ranks=2, backend="minimal", softcap=5.0)
