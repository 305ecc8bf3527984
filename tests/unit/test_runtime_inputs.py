"""How arrays become what an engine reads."""

from __future__ import annotations

import numpy as np
import pytest

from trtforge.errors import GraphError
from trtforge.runtime.lane import _converted

INT32, INT64, HALF = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float16)


def test_shapes_stay_and_bytes_lie_in_order():
    assert _converted("x", np.array(7), INT32).shape == ()
    assert _converted("x", np.ones((2, 3)).T, HALF).flags.c_contiguous
    assert _converted("x", [[1, 2]], INT64).tolist() == [[1, 2]]


def test_integers_that_the_engine_cannot_hold_are_told():
    assert _converted("x", np.array([-(2**31), 2**31 - 1]), INT32).tolist() == [-(2**31), 2**31 - 1]
    with pytest.raises(GraphError, match="input 'x' is int32 in the engine, and holds values from 0 to 2147483648"):
        _converted("x", np.array([0, 2**31]), INT32)
