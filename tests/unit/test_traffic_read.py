"""Traffic logs of every format: what is counted, and what is said of rows that cannot be."""

import csv
import gzip
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trtforge.errors import SpecError, StoreError, TrtForgeError
from trtforge.traffic import batching
from trtforge.traffic.histogram import distinct
from trtforge.traffic.layout import layout_of
from trtforge.traffic.read import read_traffic
from trtforge.types import TensorSpec

BERT = layout_of([TensorSpec("ids", "int64", ("batch", "seq")), TensorSpec("mask", "int64", ("batch", "seq"))])
IMAGE = layout_of([TensorSpec("image", "float32", (None, 3, "height", "width"))])


def _counted(traffic):
    return dict(zip(map(tuple, traffic.sizes.tolist()), traffic.counts.tolist(), strict=True))


def _jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_layout_names_symbols_and_axes():
    assert BERT.names == ("batch", "seq")
    assert BERT.batch == "batch"
    assert IMAGE.names == ("image[0]", "height", "width")
    assert IMAGE.batch == "image[0]"
    assert IMAGE.shapes([2, 640, 480]) == {"image": (2, 3, 640, 480)}


def test_inputs_that_are_linked_need_not_all_be_given(tmp_path):
    rows = [
        {"batch": 8, "seq": 64},
        {"inputs": {"ids": [8, 64]}, "count": 3},
        {"inputs": {"ids": [8, 64], "mask": [8, 64]}},
        {"ids": [1, 16]},
    ]

    assert _counted(read_traffic(_jsonl(tmp_path / "log.jsonl", rows), BERT)) == {(8, 64): 5, (1, 16): 1}


ROWS = [(1, 16, 1, 0.0), (8, 64, 2, 0.25), (1, 16, 5, 7.5), (2, 300, 1, 1e6)]


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".parquet", ".json"])
def test_every_format_says_the_same(tmp_path, ending):
    path = tmp_path / f"log{ending}"
    dicts = [dict(zip(("batch", "seq", "count", "timestamp"), row, strict=True)) for row in ROWS]
    if ending == ".parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(dicts), path)
    elif ending == ".json":
        path.write_text(json.dumps(dicts))
    else:
        with (gzip.open if ending.endswith(".gz") else open)(path, "wt", newline="") as file:
            if "csv" in ending:
                table = csv.DictWriter(file, ["seq", "timestamp", "batch", "count"])
                table.writeheader()
                table.writerows(dicts)
            else:
                file.writelines(json.dumps(row) + "\n" for row in dicts)

    assert _counted(read_traffic(path, BERT)) == {(1, 16): 6, (8, 64): 2, (2, 300): 1}
    if ending != ".json":
        traffic = read_traffic(path, BERT, with_arrivals=True)
        arrivals = traffic.arrivals
        assert arrivals.seconds.tolist() == [0.0, 0.25, 0.25, *[7.5] * 5, 1e6]
        shapes = traffic.sizes[arrivals.shapes].tolist()
        assert shapes == [[1, 16], [8, 64], [8, 64], *[[1, 16]] * 5, [2, 300]]


def test_csv_holds_shapes_of_inputs_too(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text('\ufeffids,count\r\n8x64,2\r\n"[8, 64]",1\r\n"(1,16)",1\r\n', encoding="utf-8")

    assert _counted(read_traffic(path, BERT)) == {(8, 64): 3, (1, 16): 1}


def test_parquet_holds_shapes_of_inputs_too(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "log.parquet"
    pq.write_table(
        pa.table({"ids": [[8, 64], [8, 64], [1, 2, 3], [1, 16]], "mask": [[8, 64], [8, 65], [1, 2], [1, 16]]}), path
    )
    traffic = read_traffic(path, BERT)

    assert _counted(traffic) == {(8, 64): 1, (1, 16): 1}
    assert {(misfit.reason, misfit.line) for misfit in traffic.misfits} == {
        ("'seq' is 64 in axis 1 of 'ids' and 65 in axis 1 of 'mask'", 2),
        ("'ids' has 3 sizes, the model's has 2", 3),
    }


def test_rows_the_model_can_never_take_are_counted_apart(tmp_path):
    rows = [
        {"image": [1, 3, 8, 8]},
        {"image": [1, 4, 8, 8]},
        {"image": [1, 3, 8]},
        {"image": [1, 4, 8, 8], "count": 5},
    ]
    traffic = read_traffic(_jsonl(tmp_path / "log.jsonl", rows * 2), IMAGE)

    assert _counted(traffic) == {(1, 8, 8): 2}
    assert [(misfit.reason, misfit.count, misfit.line) for misfit in traffic.misfits] == [
        ("axis 1 of 'image' is 4, the model fixes it at 3", 12, 2),
        ("'image' has 3 sizes, the model's has 4", 2, 3),
    ]
    assert traffic.num_requests == 16


BAD = {
    '{"batch": 0, "seq": 4}': "'batch' is 0, expected 1 or more",
    '{"batch": -3, "seq": 4}': "'batch' is -3, expected 1 or more",
    '{"batch": 1.5, "seq": 4}': "'batch' is 1.5, expected a whole number",
    '{"batch": true, "seq": 4}': "'batch' is true, expected a whole number",
    '{"batch": 4294967296, "seq": 4}': "'batch' is 4294967296, expected 1 to 2147483647",
    '{"batch": 1, "seqq": 4}': "unknown size 'seqq'; 'seq' is meant? (the model's open sizes: batch, seq; "
    "its inputs: ids, mask)",
    '{"inputs": {"idss": [1, 2]}}': "unknown input 'idss'; 'ids' is meant? (the model's inputs: ids, mask)",
    '{"batch": 1}': "nothing gives 'seq', neither itself nor the shape of 'ids' or 'mask'",
    '{"batch": 1, "seq": 4': "it is no JSON object: Expecting ',' delimiter",
    "[1, 2]": 'found a list, expected an object such as {"batch": 8, "seq": 64}',
    '{"batch": 1, "batch": 2, "seq": 4}': "it has the key 'batch' twice",
    '{"batch": 1, "seq": 4, "count": 0}': "count is 0, expected 1 or more",
    '{"ids": "8x64x", "batch": 1}': "'ids' is '8x64x', expected a shape such as [8, 64] or 8x64",
    '{"ids": [0, 64]}': "axis 0 of 'ids' is 0, expected 1 or more",
    "\\xff": "it is no JSON object: Expecting value",
    "[" * 100_000: "it is no JSON object: ",
}


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named_with_its_number(tmp_path, line):
    path = tmp_path / "log.jsonl"
    path.write_text('{"batch": 1, "seq": 4}\n' + line + '\n{"batch": 1, "seq": 4}\n')

    with pytest.raises(TrtForgeError) as raised:
        read_traffic(path, BERT)

    (problem,) = raised.value.problems
    assert problem.summary.startswith(BAD[line])
    assert (problem.where.line, problem.exit_code) == (2, 2)


def test_all_bad_lines_are_named_up_to_twenty(tmp_path):
    path = _jsonl(tmp_path / "log.jsonl", [{"batch": -number, "seq": 1} for number in range(50)])

    with pytest.raises(TrtForgeError) as raised:
        read_traffic(path, BERT)

    assert [problem.where.line for problem in raised.value.problems] == list(range(1, 21))


@pytest.mark.parametrize("text", ["", "\n\n  \n"])
def test_an_empty_log(tmp_path, text):
    path = tmp_path / "log.jsonl"
    path.write_text(text)

    with pytest.raises(SpecError, match="holds no requests"):
        read_traffic(path, BERT)


def test_files_that_are_no_logs(tmp_path):
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(b'{"batch": 1, "seq": 2}\n' * 9)[:-6])
    (tmp_path / "log.csv").write_text("batch,seqq,batch\n1,2,3\n")
    (tmp_path / "log.txt").write_text("1 2\n")

    for name, words in {
        "log.jsonl.gz": "no whole gzip file",
        "log.csv": "2 problems",
        "log.txt": "unknown kind of name",
    }.items():
        with pytest.raises(TrtForgeError, match=words):
            read_traffic(tmp_path / name, BERT)
    with pytest.raises(StoreError):
        read_traffic(tmp_path / "absent.csv", BERT)


@pytest.mark.parametrize("ending", [".jsonl", ".csv"])
@pytest.mark.parametrize(
    ("stamps", "words"),
    [
        ((5, 4.5), "its timestamp is 0.5 s before that of the row above it, so batches cannot be told"),
        ((5, "yesterday"), "its timestamp is "),
        (("2025-01-31T00:00:00Z", "2025-01-31T00:00:00+01:00"), "its timestamp is "),
    ],
)
def test_times_that_fall_or_are_none(tmp_path, ending, stamps, words):
    rows = [{"batch": 1, "seq": 4, "timestamp": stamp} for stamp in stamps]
    path = tmp_path / f"log{ending}"
    if ending == ".csv":
        path.write_text("batch,seq,timestamp\n" + "".join(f"1,4,{stamp}\n" for stamp in stamps))
    else:
        _jsonl(path, rows)

    assert read_traffic(path, BERT).num_requests == 2
    with pytest.raises(TrtForgeError) as raised:
        read_traffic(path, BERT, with_arrivals=True)
    (problem,) = raised.value.problems
    assert problem.summary.startswith(words)
    assert problem.where.line == (3 if ending == ".csv" else 2)


def test_times_in_iso_8601(tmp_path):
    stamps = ["2025-01-31T23:59:59.25Z", "2025-02-01T00:00:00Z"]
    path = _jsonl(tmp_path / "log.jsonl", [{"batch": 1, "seq": 4, "timestamp": stamp} for stamp in stamps])

    assert np.diff(read_traffic(path, BERT, with_arrivals=True).arrivals.seconds).tolist() == [0.75]


def test_a_row_without_time(tmp_path):
    path = _jsonl(tmp_path / "log.jsonl", [{"batch": 1, "seq": 4, "timestamp": 1}, {"batch": 1, "seq": 4}])

    with pytest.raises(TrtForgeError) as raised:
        read_traffic(path, BERT, with_arrivals=True)
    assert raised.value.problems[0].summary == "it has no timestamp, which --window-ms needs"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=30
    ),
    window=st.integers(0, 5),
    most=st.integers(1, 12),
)
def test_batches_are_those_of_a_queue_simulated_one_by_one(tmp_path, monkeypatch, rows, window, most):
    monkeypatch.setattr(batching, "_BLOCK", 7)  # so that there are several
    at, requests = 0, []
    lines = []
    for batch, seq, count, gap in rows:
        at += gap
        lines.append({"batch": batch, "seq": seq, "count": count, "timestamp": at})
        requests += [(at, batch, seq)] * count
    queue, formed = [], []
    for time, batch, seq in requests:
        if queue and (time > queue[0][0] + window or sum(one[1] for one in queue) + batch > most):
            formed.append((sum(one[1] for one in queue), max(one[2] for one in queue)))
            queue = []
        queue.append((time, batch, seq))
    formed.append((sum(one[1] for one in queue), max(one[2] for one in queue)))
    traffic = read_traffic(_jsonl(tmp_path / "log.jsonl", lines), BERT, with_arrivals=True)

    found = batching.formed_batches(traffic, "batch", window, most)

    assert _counted(found) == {shape: formed.count(shape) for shape in formed}


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9)), min_size=1))
def test_distinct_adds_the_counts_of_equal_rows(rows):
    table = np.array(rows, np.int64)
    sizes, counts = distinct(table[:, :2], table[:, 2])
    expected = {}
    for batch, seq, count in rows:
        expected[batch, seq] = expected.get((batch, seq), 0) + count

    assert list(map(tuple, sizes.tolist())) == sorted(expected)
    assert counts.tolist() == [expected[shape] for shape in sorted(expected)]
