"""Comparing stages: inputs over the whole profile, outputs by name, and what can never pass unseen."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from trtforge.errors import GraphError, SeveralErrors, SpecError
from trtforge.parity.metrics import Element
from trtforge.parity.staged import IndexedScores, ParityInput, compare_stage, parity_inputs
from trtforge.parity.tolerances import Tolerance
from trtforge.samples.source import Sample
from trtforge.types import Graph, InputRole, Profile, ShapeRange, TensorSpec

TOLERANCE = Tolerance(atol=1e-5, rtol=1e-5)


def graph_of(**inputs):
    """A graph by its inputs: name -> dims, float32; a name that begins with `n_` decides a shape."""
    kinds = {name: "shape_values" if name.startswith("n_") else "free" for name in inputs}
    return Graph(
        source=Path("m.onnx"),
        path=Path("m.onnx"),
        weights_dir=Path(),
        digest="",
        ir_version=8,
        opsets=(("", 17),),
        producer="",
        inputs=tuple(
            TensorSpec(name, "int64" if kinds[name] == "shape_values" else "float32", dims)
            for name, dims in inputs.items()
        ),
        outputs=(),
        roles=tuple(InputRole(name, kind, 0, 1, "") for name, kind in kinds.items()),
        data_dependent_outputs=(),
        operators=(),
        element_types=(),
        has_qdq=False,
        wide_int_constants=(),
        num_nodes=1,
        weight_bytes=0,
    )


def profile_of(name="p", values=None, **shapes):
    return Profile(
        name,
        {key: ShapeRange(*given) for key, given in shapes.items()},
        {key: ShapeRange(*given) for key, given in (values or {}).items()},
    )


CHAT = profile_of(ids=((1, 16), (8, 64), (32, 128)), mask=((1, 16), (8, 64), (32, 128)))
BERT = graph_of(ids=("batch", "sequence"), mask=("batch", "sequence"))


def inputs_of(graph, *profiles, samples=(), num_random=0, seed=0):
    return list(parity_inputs(graph, profiles, {}, samples, num_random=num_random, seed=seed))


def shapes_of(given):
    return {name: feed.shape for name, feed in given.feeds.items()}


def test_samples_come_first_then_the_points_then_sizes_in_between():
    sample = Sample("s.npz[0]", {name: np.zeros((1, 20), np.float32) for name in ("ids", "mask")})
    points = inputs_of(BERT, CHAT, samples=[sample], num_random=2)

    assert [point.label for point in points] == [
        "s.npz[0]",
        "profile 'p' min",
        "profile 'p' opt",
        "profile 'p' max",
        "profile 'p' random 0",
        "profile 'p' random 1",
    ]
    assert [point.seed for point in points] == [None, 0, 1, 2, 3, 4]
    assert [point.is_drawn for point in points] == [False] * 4 + [True] * 2
    assert points[0].feeds is sample.feeds


def test_drawn_sizes_stay_inside_share_symbols_and_differ():
    points = inputs_of(BERT, CHAT, num_random=40)[3:]
    shapes = [shapes_of(point) for point in points]

    assert all(shape["ids"] == shape["mask"] for shape in shapes)
    assert all(1 <= shape["ids"][0] <= 32 and 16 <= shape["ids"][1] <= 128 for shape in shapes)
    assert len({shape["ids"] for shape in shapes}) == 40
    assert len({shape["ids"][1] % 16 for shape in shapes}) > 5
    assert all(shape["ids"][1] % 16 == 0 for shape in shapes[1::2])  # the steps of 16, 64 and 128


def test_unnamed_axes_of_one_range_are_drawn_together():
    graph = graph_of(a=(None, 3), b=(None, None))
    profile = profile_of(a=((1, 3), (4, 3), (9, 3)), b=((1, 2), (4, 5), (9, 30)))

    for point in inputs_of(graph, profile, num_random=10):
        assert point.feeds["a"].shape[0] == point.feeds["b"].shape[0]


def test_the_same_arguments_give_the_same_inputs():
    first, again, other = (inputs_of(BERT, CHAT, num_random=3, seed=seed) for seed in (5, 5, 6))

    assert [point.label for point in first] == [point.label for point in again]
    for mine, same in zip(first, again, strict=True):
        np.testing.assert_equal(mine.feeds, same.feeds)
    assert [shapes_of(point) for point in first[3:]] != [shapes_of(point) for point in other[3:]]


def test_equal_points_occur_once_and_a_static_model_gets_other_values():
    static = profile_of("a", x=((2, 3),) * 3), profile_of("b", x=((2, 3),) * 3)
    points = inputs_of(graph_of(x=(2, 3)), *static, num_random=2)

    assert [point.label for point in points] == [
        "profile 'a' min",
        "profile 'a' random 0",
        "profile 'a' random 1",
        "profile 'b' random 0",
        "profile 'b' random 1",
    ]
    assert len({point.feeds["x"].tobytes() for point in points}) == 5


def test_values_that_decide_shapes_are_drawn_too():
    graph = graph_of(x=("n",), n_out=(2,))
    profile = profile_of(x=((1,), (2,), (9,)), n_out=((2,),) * 3, values={"n_out": ((1, 10), (2, 20), (3, 300))})
    points = inputs_of(graph, profile, num_random=5)

    assert [point.values["n_out"] for point in points[:3]] == [(1, 10), (2, 20), (3, 300)]
    assert len({point.values["n_out"] for point in points}) == 8
    for point in points:
        low, high = point.values["n_out"]
        assert 1 <= low <= 3
        assert 10 <= high <= 300
        assert point.feeds["n_out"].tolist() == [low, high]


def test_inputs_are_made_one_at_a_time():
    huge = profile_of(x=((1,), (1 << 40,), (1 << 40,)))  # 4 TiB, if it were made

    assert next(iter(parity_inputs(graph_of(x=("n",)), [huge], {}, [], num_random=0, seed=0))).label.endswith("min")


@pytest.mark.parametrize("length", [15, 129])
def test_a_sample_outside_every_profile_is_refused(length):
    sample = Sample("s.npz[4]", {name: np.zeros((1, length), np.float32) for name in ("ids", "mask")})

    with pytest.raises(SeveralErrors) as caught:
        inputs_of(BERT, CHAT, samples=[sample])
    problem = caught.value.problems[0]
    assert problem.exit_code == SpecError.exit_code
    assert problem.summary == f"s.npz[4] fits no optimization profile: found ids [1, {length}], mask [1, {length}]"
    assert problem.detail == ("profile 'p': ids [1, 16] to [32, 128], mask [1, 16] to [32, 128]",)


@dataclass
class Function:
    """A version of a model, in numpy."""

    run_on: object
    name: str = "numpy"
    facts: dict = field(default_factory=lambda: {"numpy": np.__version__})

    def run(self, feeds):
        return self.run_on(feeds)


def lengths(*sizes):
    """Generated inputs of these lengths."""
    rng = np.random.default_rng(0)
    for size in sizes:
        feeds = {"x": rng.normal(size=(2, size)).astype(np.float32)}
        yield ParityInput(f"profile 'p' random {size}", feeds, {}, size, is_drawn=True)


def double(feeds):
    return {"y": feeds["x"] * 2, "n": np.array(feeds["x"].shape, np.int64)}


def check(candidate, inputs=None, reference=double, tolerances=None, told=None, **options):
    return compare_stage(
        Function(reference, "before"),
        Function(candidate, "after"),
        lengths(4, 5) if inputs is None else inputs,
        tolerances or {"y": TOLERANCE, "n": TOLERANCE},
        "engine",
        ([] if told is None else told).append,
        **options,
    )


def broken_of(report):
    return [
        (output.name, reason.metric, reason.found)
        for point in report.points
        for output in point.outputs
        for reason in output.verdict.reasons
    ]


def test_equal_versions_pass_and_the_report_says_what_ran():
    told = []
    report = check(double, told=told)

    assert (report.verdict, report.reason) == ("passed", "within tolerance at 2 points")
    assert (report.stage, report.reference.name, report.candidate.name) == ("engine", "before", "after")
    assert report.reference.facts == {"numpy": np.__version__}
    assert told == [point.label for point in report.points] == ["profile 'p' random 4", "profile 'p' random 5"]
    assert [point.shapes for point in report.points] == [{"x": (2, 4)}, {"x": (2, 5)}]


def test_a_fault_at_one_length_is_found_there():
    def faulty(feeds):
        outputs = double(feeds)
        if feeds["x"].shape[1] == 37:
            outputs["y"][1, 30] += 0.5
        return outputs

    report = check(faulty, lengths(*range(30, 40)))

    assert report.verdict == "failed"
    assert [point.label for point in report.points if not point.passed] == ["profile 'p' random 37"]
    assert report.points[7].outputs[0].verdict.closest.at.index == (1, 30)


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        (lambda y, n: {"y": y}, [("n", "name", "missing")]),
        (lambda y, n: {"y_0": y, "n": n}, [("y", "name", "renamed to 'y_0'")]),
        (lambda y, n: {"y": y, "n": n, "z": y}, [("z", "name", "added")]),
        (lambda y, n: {"y": y.astype(np.float16), "n": n}, [("y", "type", "float16")]),
        (lambda y, n: {"y": y, "n": n.astype(np.int32)}, [("n", "type", "int32")]),
        (lambda y, n: {"y": y[:, :-1], "n": n}, [("y", "length", "[2, 3]")]),
        (lambda y, n: {"y": y[:, :1], "n": n}, [("y", "length", "[2, 1]")]),
        (lambda y, n: {"y": y, "n": n + 1}, [("n", "match", "2 of 2 different")]),
        (lambda y, n: {"y": np.where(y == y.max(), np.nan, y), "n": n}, [("y", "finite", "1 NaN or infinite value")]),
        (lambda y, n: {}, [("y", "name", "missing"), ("n", "name", "missing")]),
    ],
    ids=["missing", "renamed", "added", "float type", "int type", "length", "row", "integer", "nan", "nothing"],
)
def test_each_difference_is_an_error_of_its_own(change, broken):
    report = check(lambda feeds: change(**double(feeds)), lengths(4), tolerances=dict.fromkeys("yn", Tolerance(atol=9)))

    assert report.verdict == "failed"
    assert broken_of(report) == broken


def test_outputs_in_another_order_are_compared_and_wrong():
    report = check(lambda feeds: dict(reversed(double(feeds).items())))

    assert report.verdict == "failed"
    assert broken_of(report) == []
    assert report.points[0].problems == ("outputs stand in the order n, y, expected y, n",)


def stopping_at(size):
    def run(feeds):
        if feeds["x"].shape[1] == size:
            raise GraphError("stopped", detail=["sizes differ"], next_step="none")
        return double(feeds)

    return run


def test_a_candidate_that_stops_is_wrong_there():
    report = check(stopping_at(5))

    assert report.verdict == "failed"
    assert [point.problems for point in report.points] == [(), ("after stopped: sizes differ",)]


def test_a_reference_that_stops_at_drawn_sizes_compares_nothing_there():
    partly, nowhere = check(double, reference=stopping_at(5)), check(double, lengths(5), stopping_at(5))

    assert partly.verdict == "passed"
    assert [point.not_run for point in partly.points] == [None, "before stopped: sizes differ"]
    assert (nowhere.verdict, nowhere.reason) == ("not_run", "the reference ran at none of 1 point")


@pytest.mark.parametrize(("seed", "step"), [(None, "mend that sample, or leave it out"), (3, "narrow the profile")])
def test_a_reference_that_stops_elsewhere_is_an_error(seed, step):
    given = ParityInput("s.npz[0]", {"x": np.ones((2, 5), np.float32)}, {}, seed, is_drawn=False)

    with pytest.raises(GraphError, match=r"before does not run on s.npz\[0\]: x \[2, 5\]") as caught:
        check(double, [given], stopping_at(5))
    assert caught.value.problems[0].next_step.startswith(step)
    assert caught.value.problems[0].detail == ("sizes differ",)


def test_bugs_are_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        check(lambda feeds: 1 / 0)
    with pytest.raises(KeyError):
        check(double, tolerances={"y": TOLERANCE})


def test_nothing_to_compare_on_is_no_pass():
    assert check(double, []).verdict == "not_run"


def classes(feeds):
    scores = np.round(feeds["x"] * 0, 1)
    return {"scores": scores, "best": scores.argmax(-1)}


def test_ties_of_declared_scores_are_no_difference():
    def last(feeds):
        return classes(feeds) | {"best": np.full(2, feeds["x"].shape[1] - 1)}

    tolerances = {"scores": TOLERANCE, "best": TOLERANCE}

    def compared(scores):
        return check(last, reference=classes, tolerances=tolerances, scores=scores)

    assert compared(None).verdict == "failed"
    assert compared({"best": IndexedScores("scores")}).verdict == "passed"


def test_figures_of_logits_are_measured_where_asked_or_needed():
    def top1(report):
        return report.points[0].outputs[0].metrics.top1_agreement

    needed = {"y": Tolerance(atol=1.0, min_top1=1.0), "n": TOLERANCE}

    assert top1(check(double)) is None
    assert top1(check(double, logits=["y"])) == 1
    assert top1(check(double, tolerances=needed)) == 1


def test_outputs_of_one_point_are_held_at_a_time():
    import weakref

    alive = []

    def run(feeds):
        assert not [reference for reference in alive if reference() is not None]
        return double(feeds)

    def tracked(feeds):
        outputs = double(feeds)
        alive.extend(weakref.ref(array) for array in outputs.values())
        return outputs

    assert check(tracked, lengths(3, 4, 5), run).verdict == "passed"
    assert len(alive) == 6


def test_the_first_reference_point_shows_its_element():
    report = check(lambda feeds: double(feeds) | {"y": double(feeds)["y"] + np.float32(1)}, islice(lengths(1), 1))

    assert isinstance(report.points[0].outputs[0].metrics.worst, Element)
