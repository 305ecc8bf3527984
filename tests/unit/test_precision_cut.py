from __future__ import annotations

from itertools import product

import hypothesis.strategies as st
from hypothesis import given, settings

from trtforge.precision.cut import high_units

UNITS = 6


def total_cost(high, values):
    def cost_of(giver, readers, wanted_high, cost):
        given = giver is None or giver in high
        wanted = {reader in high for reader in readers} | ({True} if wanted_high else set())
        return cost if wanted - {given} else 0

    return sum(cost_of(*value) for value in values)


VALUES = st.lists(
    st.tuples(
        st.none() | st.integers(0, UNITS - 1),
        st.lists(st.integers(0, UNITS - 1), unique=True, max_size=3),
        st.booleans(),
        st.sampled_from([1, 8]),
    ),
    max_size=10,
)


@given(VALUES, st.lists(st.sampled_from(["high", "low", "free"]), min_size=UNITS, max_size=UNITS))
@settings(max_examples=300, deadline=None)
def test_no_other_assignment_is_cheaper(values, kinds):
    high = {unit for unit, kind in enumerate(kinds) if kind == "high"}
    low = {unit for unit, kind in enumerate(kinds) if kind == "low"}
    free = [unit for unit, kind in enumerate(kinds) if kind == "free"]
    choices = [
        high | {unit for unit, is_high in zip(free, bits, strict=True) if is_high}
        for bits in product((False, True), repeat=len(free))
    ]
    least = min(total_cost(choice, values) for choice in choices)

    chosen = high_units(UNITS, high, low, values)

    assert high <= chosen
    assert not low & chosen
    assert total_cost(chosen, values) == least
    assert len(chosen) == min(len(choice) for choice in choices if total_cost(choice, values) == least)


def test_a_chain_between_fp32_nodes_moves_as_a_whole():
    chain = [(None, [0], False, 1), (0, [1], False, 1), (1, [2], False, 1), (2, [3], False, 1), (3, [], True, 1)]

    assert high_units(4, [0, 3], [], chain) == {0, 1, 2, 3}
    assert high_units(4, [0, 3], [2], chain) == {0, 3}
