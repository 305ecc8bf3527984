from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from trtforge.errors import BuildError
from trtforge.stages import Stages
from trtforge.store import StageKey, open_store

KEY = StageKey("build", 1, {}, {"a": 1, "b": 2, "c": 3, "d": 4}, {})


def describe(result):
    return (f"result {result}", "and a note")


@pytest.fixture
def events():
    return []


@pytest.fixture
def stages(tmp_path, events):
    with open_store(tmp_path / "store", events.append) as store:
        yield Stages(store, events.append, "spec")


def run(stages, key=KEY, result=1, label="build x"):
    return stages.run(label, key, lambda: (result, {}), describe).result


def never():
    pytest.fail("the stage ran again")


def test_a_stage_runs_once(stages, events):
    assert run(stages, result=1) == 1
    assert stages.run("build x", KEY, never, describe).result == 1
    assert [(stage.name, stage.key, stage.verdict, stage.notes) for stage in stages.done] == [
        ("build x", KEY.digest, verdict, ("result 1", "and a note")) for verdict in ("new", "cached")
    ]
    assert [(event.kind, event.stage, event.text) for event in events] == [
        ("started", "build x", ""),
        ("done", "build x", "new; result 1; and a note"),
        ("started", "build x", ""),
        ("done", "build x", "cached; result 1"),
    ]


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"a": 9}, "stale, a changed"),
        ({"a": 9, "b": 9, "c": 9}, "stale, a, b, c changed"),
        ({"a": 9, "b": 9, "c": 9, "d": 9}, "stale, a, b, c and 1 more changed"),
    ],
)
def test_a_changed_one_says_what_changed_and_a_look_changes_nothing(stages, changes, verdict):
    new = replace(KEY, parameters={**KEY.parameters, **changes})
    assert stages.verdict("build x", KEY) == "new"
    run(stages)
    for _ in range(2):
        assert stages.verdict("build x", KEY) == "cached"
        assert stages.verdict("build x", new) == verdict
    run(stages, new)
    assert stages.done[-1].verdict == verdict
    assert stages.verdict("build x", KEY) == "cached"


def test_one_label_is_not_stale_for_another(stages):
    run(stages)
    assert stages.verdict("build y", replace(KEY, version=2)) == "new"
    assert stages.verdict("build y", KEY) == "cached"


def test_what_fails_is_not_stored(stages):
    def fail():
        raise BuildError("no", next_step="x")

    with pytest.raises(BuildError):
        stages.run("build x", KEY, fail, describe)
    assert stages.verdict("build x", KEY) == "new"
    assert stages.done == []
    assert run(stages, result=2) == 2


def test_a_second_run_of_the_same_waits_says_so_and_reuses(stages, events):
    inside, go_on = threading.Event(), threading.Event()

    def slow():
        inside.set()
        assert go_on.wait(10)
        return 1, {}

    first = threading.Thread(target=stages.run, args=("build x", KEY, slow, describe))
    first.start()
    assert inside.wait(10)
    second = threading.Thread(target=stages.run, args=("build y", KEY, never, describe))
    second.start()
    while not any(event.kind == "warning" for event in list(events)):
        second.join(0.01)
    (warning,) = (event for event in events if event.kind == "warning")
    assert (warning.stage, warning.text) == ("build y", "another build makes the same; waiting for it")
    go_on.set()
    first.join()
    second.join()
    assert [(stage.name, stage.verdict) for stage in stages.done] == [("build x", "new"), ("build y", "cached")]


def test_a_waiter_whose_holder_failed_runs_it_itself(stages):
    inside, go_on = threading.Event(), threading.Event()

    def fail():
        inside.set()
        assert go_on.wait(10)
        raise BuildError("no", next_step="x")

    def first():
        with pytest.raises(BuildError):
            stages.run("build x", KEY, fail, describe)

    threads = [threading.Thread(target=first), threading.Thread(target=run, args=(stages, KEY, 2))]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join()
    assert run(stages, result=3) == 2
