"""The picture of traffic in a terminal and as SVG."""

from xml.etree import ElementTree as ET

import numpy as np
import pytest

from trtforge.traffic.choose import Box
from trtforge.traffic.histogram import Traffic
from trtforge.traffic.picture import Axis, heights, svg_picture, terminal_picture

BOXES = [
    Box(*(np.array(sizes) for sizes in ([1, 16], [1, 32], [4, 64]))),
    Box(*(np.array(sizes) for sizes in ([5, 16], [8, 64], [8, 64]))),
]


def _traffic(names=("batch", "seq")):
    return Traffic(names, np.array([[1, 16], [1, 32], [8, 64]]), np.array([10, 40, 5]))


@pytest.mark.parametrize("axis", [Axis(1, 8), Axis(3, 1000)])
def test_an_axis_begins_at_its_lowest_size_and_ends_after_its_highest(axis):
    assert axis.at(axis.low) == 0
    assert axis.at(axis.high + 1) == 1
    assert 0 < axis.at(axis.low + 1) < axis.at(axis.high)


@pytest.mark.parametrize("high", [16, 100, 5000])
def test_a_column_is_as_high_as_the_sizes_in_it_have_requests(high):
    column = np.arange(1, high + 1)

    np.testing.assert_allclose(heights(column, np.full(high, 2), Axis(1, high), 20), 2)


def test_sizes_without_requests_lower_their_column():
    # Two columns of five sizes each: 10 requests on one size of five, 5 on each of the others.
    found = heights(np.array([1, 6, 7, 8, 9, 10]), np.array([10, 5, 5, 5, 5, 5]), Axis(1, 10), 2)

    np.testing.assert_allclose(found, [2, 5])


@pytest.mark.parametrize("width", [20, 80, 300])
def test_lines_fit_the_terminal(width):
    lines = terminal_picture(_traffic(), BOXES, ["p1-1x32", "p2-8x64"], width)

    assert max(map(len, lines)) <= max(min(width, 100), 36)
    ranges = [line for line in lines if "●" in line]
    assert len(ranges) == 4  # two profiles under each of two sizes
    assert all(line.count("●") == 1 for line in ranges)


def test_bars_and_ranges_stand_under_each_other():
    traffic = Traffic(("n",), np.array([[1], [2], [3]]), np.array([8, 4, 2]))
    box = Box(np.array([2]), np.array([3]), np.array([4]))

    lines = terminal_picture(traffic, [box], ["p"], 36)

    # Twenty columns for four sizes: five each.
    assert lines[0] == "n  1 to 4, requests of each size"
    assert lines[1] == " " * 13 + "8" + "  █████"
    assert lines[5] == " " * 16 + "█" * 15
    assert lines[6] == " " * 13 + "p" + "  " + " " * 5 + "├────●────────┤"


def test_svg_is_well_formed_titled_and_escaped():
    text = svg_picture(_traffic(("<b>&\x1b", "seq")), BOXES, ['p1"', "p2"], "log<script>.jsonl")
    root = ET.fromstring(text)  # noqa: S314 - our own text
    space = "{http://www.w3.org/2000/svg}"

    assert root.get("role") == "img"
    assert root.find(f"{space}title").text == "log<script>.jsonl"
    assert "55 requests" in root.find(f"{space}desc").text
    assert "\x1b" not in text
    assert "<script" not in text
    assert len(root.findall(f"{space}circle")) == 4
    assert {child.tag.removeprefix(space) for child in root} == {"title", "desc", "rect", "text", "path", "circle"}
