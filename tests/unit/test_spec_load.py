"""Build specs: what is accepted, every problem at its place, `extends`, paths, digests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtforge.errors import SpecError, TrtForgeError
from trtforge.spec.load import load_spec
from trtforge.spec.model import BuildSpec, InputProfile

GOOD = """\
version: 1
name: net
model: {onnx: net.onnx}
targets:
  - {backend: tensorrt_rtx, gpus: [sm86]}
"""
FULL = """\
version: 1
name: net
model:
  onnx: models/net.onnx
inputs:
  ids: {kind: token_ids, range: [0, 99]}
  image: &pixels {range: [0.5, 1e3]}
profiles:
  - name: chat
    inputs:
      ids: {min: [1, 16], opt: 8x64, max: [32, 128]}
      image: [1, 3, 8, 8]
      size: {values: {min: [1, 1], opt: [2, 2], max: 4}}
precision: {type: fp32, tf32: true}
builder: {optimization_level: 4, workspace_mib: 512, tactic_sources: [cublas]}
fail_on_warning: ["*INT64*"]
targets:
  - {backend: tensorrt_rtx, gpus: [sm86, sm120], version: 1.7}
  - {backend: tensorrt, gpus: [T4], version: 10.10, when_missing: skip}
output: out
"""

_AS_FILE_NAME = "expected letters, digits, '.', '_' and '-' only, as it becomes a file name"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads a text as spec.yaml; further files by name."""
    monkeypatch.chdir(tmp_path)

    def load_text(text, **files):
        for name, content in {"spec": text, **files}.items():
            path = tmp_path / f"{name.replace('__', '/')}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        return load_spec(tmp_path / "spec.yaml")

    return load_text


@pytest.fixture
def lines(load):
    """The problems of a text: each as its location and summary."""

    def of(text, **files):
        with pytest.raises(TrtForgeError) as stopped:
            load(text, **files)
        assert all(problem.exit_code == 2 for problem in stopped.value.problems)
        assert all(problem.next_step for problem in stopped.value.problems)
        return [problem.lines()[0] for problem in stopped.value.problems]

    return of


def test_a_full_spec(load):
    spec = load(FULL).spec

    assert spec.profiles[0].inputs == {
        "ids": InputProfile(min=(1, 16), opt=(8, 64), max=(32, 128)),
        "image": InputProfile(min=(1, 3, 8, 8), opt=(1, 3, 8, 8), max=(1, 3, 8, 8)),
        "size": spec.profiles[0].inputs["size"],
    }
    assert spec.profiles[0].inputs["size"].values.max == (4,)
    assert [target.version for target in spec.targets] == ["1.7", "10.10"]
    assert spec.inputs["image"].range == (0.5, 1000.0)


@pytest.mark.parametrize(
    ("more", "read", "expected"),
    [
        # C60: numbers without a dot, and in quotes.
        ("inputs: {x: {range: [-1e-5, 1e5]}}", lambda s: s.inputs["x"].range, (-1e-5, 1e5)),
        ('inputs: {x: {range: ["1e-5", ".5"]}}', lambda s: s.inputs["x"].range, (1e-5, 0.5)),
        ('builder: {workspace_mib: "512"}', lambda s: s.builder.workspace_mib, 512),
        ("builder: {workspace_mib: 0x10}", lambda s: s.builder.workspace_mib, 16),
        ("builder: {workspace_mib: 2.0}", lambda s: s.builder.workspace_mib, 2),
        ('profiles: [{inputs: {x: ["1", 010, 0o10, 1e1]}}]', lambda s: s.profiles[0].inputs["x"].max, (1, 10, 8, 10)),
        ("profiles: [{inputs: {x: 1x3x8}}]", lambda s: s.profiles[0].inputs["x"].opt, (1, 3, 8)),
        ("profiles: [{inputs: {x: []}}]", lambda s: s.profiles[0].inputs["x"].opt, ()),
        ("profiles: [{inputs: {7: [1]}}]", lambda s: list(s.profiles[0].inputs), ["7"]),
        ("profiles: [{inputs: {no: [1]}}]", lambda s: list(s.profiles[0].inputs), ["no"]),
        ("profiles: [{name: 010, inputs: {}}]", lambda s: s.profiles[0].name, "010"),
        ("fail_on_warning: [1.50]", lambda s: s.fail_on_warning, ("1.50",)),
        ("extends: []", lambda s: s.name, "net"),
    ],
)
def test_numbers_and_names_as_people_write_them(load, more, read, expected):
    assert read(load(f"{GOOD}{more}\n").spec) == expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("precision: {tf32: yes}", "6:13: error: precision.tf32: found 'yes', expected true or false"),
        ("precision: {tf32: 1}", "6:13: error: precision.tf32: found 1, expected true or false"),
        ('precision: {tf32: "true"}', "6:13: error: precision.tf32: found 'true', expected true or false"),
        ("precision: {type: }", "6:13: error: found nothing at precision.type, expected 'fp32', 'as_model', 'fp16'"),
        ("precision: fp16", "6:1: error: precision: found 'fp16', expected a mapping with keys such as keep"),
        ("profiles: {a: b}", "6:1: error: profiles: found a mapping, expected a list"),
        ("inputs: [x]", "6:1: error: inputs: found a list, expected a mapping"),
        ("inputs: {x: }", "6:10: error: inputs.x: found nothing, expected a mapping"),
        ("inputs: {x: {range: [1, 0]}}", "6:14: error: inputs.x.range: found [1, 0], expected the lower bound first"),
        ("inputs: {x: {range: [1]}}", "6:14: error: inputs.x.range: found 1 entries, expected 2"),
        ("inputs: {x: {range: [1, 2, 3]}}", "6:14: error: inputs.x.range: found 3 entries, expected 2"),
        ("inputs: {x: {range: [0, .inf]}}", "6:25: error: inputs.x.range[1]: found .inf, expected a finite number"),
        ("inputs: {x: {range: [0, 1e999]}}", "6:25: error: inputs.x.range[1]: found 1e999, expected a finite number"),
        ("inputs: {x: {range: [0, true]}}", "6:25: error: inputs.x.range[1]: found true, expected a number"),
        ("inputs: {x: {range: [0, big]}}", "6:25: error: inputs.x.range[1]: found 'big', expected a number"),
        ("profiles: [{inputs: {x: [1, -1]}}]", "6:22: error: profiles[0].inputs.x: found -1, expected a value greater"),
        (
            "profiles: [{inputs: {x: {min: [true]}}}]",
            "6:32: error: profiles[0].inputs.x.min[0]: found true, expected a",
        ),
        (
            "profiles: [{inputs: {x: {min: [1.5]}}}]",
            "6:32: error: profiles[0].inputs.x.min[0]: found 1.5, expected a w",
        ),
        (
            "profiles: [{inputs: {x: {min: [.nan]}}}]",
            "6:32: error: profiles[0].inputs.x.min[0]: found .nan, expected a",
        ),
        (
            "profiles: [{inputs: {x: {min: [~]}}}]",
            "6:32: error: profiles[0].inputs.x.min[0]: found nothing, expected a",
        ),
        ("profiles: [{inputs: {x: 1X3}}]", "6:22: error: profiles[0].inputs.x: found '1X3', expected a shape such as"),
        ("profiles: [{inputs: {x: ٣x٤}}]", "6:22: error: profiles[0].inputs.x: found '٣x٤', expected a shape such as"),
        (
            "profiles: [{inputs: {x: {min: [9223372036854775808]}}}]",
            "6:32: error: profiles[0].inputs.x.min[0]: found 9223372036854775808, expected a value less",
        ),
        (
            "profiles: [{inputs: {x: {values: {min: 1, opt: 2}}}}]",
            "6:26: error: profiles[0].inputs.x.values lacks the ke",
        ),
        ("profiles: [{inputs: {}, name: a/b}]", "6:25: error: profiles[0].name: found 'a/b', expected letters, digits"),
        ("builder: {optimization_level: 9}", "6:11: error: builder.optimization_level: found 9, expected a value less"),
        ("builder: {tactic_sources: [cublass]}", "6:28: error: found 'cublass' at builder.tactic_sources[0], expected"),
        ("output: [a]", "6:1: error: output: found a list, expected a path"),
        ("output: ", "6:1: error: output: found nothing, expected a path"),
        ("extends: ", "6:1: error: found nothing in 'extends', expected a path"),
        ("extends: [spec.yaml, {a: 1}]", "6:11: error: spec.yaml extends itself"),
        ("extends: {a: 1}", "6:1: error: found a mapping in 'extends', expected a path"),
    ],
)
def test_a_problem_stands_at_its_place(lines, more, expected):
    (line,) = lines(f"{GOOD}{more}\n")

    assert line.startswith(f"spec.yaml:{expected}")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("version: 1", "version: 2", "1:1: error: found 2 at version, expected 1"),
        ("version: 1", 'version: "1"', "1:1: error: found '1' at version, expected 1"),
        ("version: 1\n", "", "1:1: error: the spec lacks the key 'version'"),
        ("name: net", "name: true", "2:1: error: name: found true, expected text"),
        ("name: net", "name: " + "n" * 101, "2:1: error: name: found 'nnn"),
        ("model: {onnx: net.onnx}", "model: net.onnx", "3:1: error: model: found 'net.onnx', expected a mapping with"),
        (
            "model: {onnx: net.onnx}",
            "model: {}",
            "3:1: error: model: found neither of onnx and torch, expected one of them",
        ),
        (
            "tensorrt_rtx",
            "tensorrt_rt",
            "5:5: error: found 'tensorrt_rt' at targets[0].backend, expected 'tensorrt_rtx'",
        ),
        ("tensorrt_rtx", "[x]", "5:5: error: found a list at targets[0].backend"),
        ("tensorrt_rtx", "", "5:5: error: found nothing at targets[0].backend"),
        ("backend: tensorrt_rtx, ", "", "5:5: error: targets[0] lacks the key 'backend'"),
        (", gpus: [sm86]", "", "5:5: error: targets[0] lacks the key 'gpus'"),
        ("[sm86]", "[]", "5:29: error: targets[0].gpus: found an empty list, expected at least one entry"),
        ("[sm86]", "sm86", "5:29: error: targets[0].gpus: found 'sm86', expected a list"),
        ("\n  - {backend: tensorrt_rtx, gpus: [sm86]}", " []", "4:1: error: targets: found an empty list, expected"),
        ("{backend: tensorrt_rtx, gpus: [sm86]}", "x", "5:5: error: targets[0]: found 'x', expected a mapping"),
    ],
)
def test_a_problem_in_a_needed_part_stands_at_its_place(lines, old, new, expected):
    (line,) = lines(GOOD.replace(old, new))

    assert line.startswith(f"spec.yaml:{expected}")


@pytest.mark.parametrize("text", ["- a\n", "a\n", "~\n", "5\n"])
def test_a_spec_is_a_mapping(lines, text):
    assert lines(text) == [
        "spec.yaml:1:1: error: found a list or a single value, expected keys such as name, model, profiles, targets"
    ]


def test_all_problems_come_at_once_in_the_order_of_the_file(lines):
    found = lines("name: a b\nprofils: []\ntargets:\n  - {backend: tensorrt, gpus: []}\n  - {backend: x}\nversion: 1\n")

    assert [line.split(" error: ")[0] for line in found] == [
        "spec.yaml:1:1:",  # the missing model, at the mapping that lacks it
        "spec.yaml:1:1:",
        "spec.yaml:2:1:",
        "spec.yaml:4:25:",
        "spec.yaml:5:5:",
    ]


@pytest.mark.parametrize(
    ("more", "next_step"),
    [
        ("profile: []", "rename it to 'profiles' (allowed: "),
        ("Output: x", "rename it to 'output'"),
        ("profiles: [{inputs: {x: {optt: [1]}}}]", "rename it to 'opt' (allowed: max, min, opt, values)"),
        ("profiles: [{inputs: {x: {values: {mim: [1], min: 1, opt: 1, max: 1}}}}]", "rename it to 'min'"),
        ("builder: {workspace_mb: 1}", "rename it to 'workspace_mib'"),
        ("precision: {zzz: 1}", "remove it (allowed: keep, min_share, quantization, rest, tf32, type)"),
        ("precision: {type: fp23}", "write fp32"),
        ("model2: {}", "rename it to 'model'"),
    ],
)
def test_the_next_step_names_the_closest_match(load, more, next_step):
    with pytest.raises(TrtForgeError) as stopped:
        load(f"{GOOD}{more}\n")

    (problem,) = stopped.value.problems
    assert problem.next_step.startswith(next_step)


def test_an_unknown_key_of_a_target_names_those_of_its_kind(load):
    with pytest.raises(TrtForgeError) as stopped:
        load(GOOD.replace("gpus:", "versoin: 1, gpus:"))

    (problem,) = stopped.value.problems
    assert problem.summary == "unknown key 'versoin' in targets[0]"
    assert problem.next_step.startswith("rename it to 'version'")


def test_where_finds_the_nearest_written_place(load):
    spec_file = load(FULL)

    assert str(spec_file.where("profiles", 0, "inputs", "ids", "max", 1)) == "spec.yaml:11:48"
    assert str(spec_file.where("profiles", 0, "inputs", "size", "values", "max", 0)) == "spec.yaml:13:49"
    assert str(spec_file.where("builder", "refit")) == "spec.yaml:15:1"
    assert str(spec_file.where("nowhere")) == "spec.yaml:1:1"


# Merging of files.


def test_extends_keeps_what_the_spec_does_not_say_and_replaces_lists(load):
    base = f"{GOOD}precision: {{type: as_model, tf32: true}}\nfail_on_warning: [a, b]\n"
    spec_file = load("extends: base.yaml\nprecision: {type: fp32}\nfail_on_warning: [c]\n", base=base)

    assert spec_file.spec.precision.type == "fp32"
    assert spec_file.spec.precision.tf32
    assert spec_file.spec.fail_on_warning == ("c",)
    assert str(spec_file.where("precision", "type")) == "spec.yaml:2:13"
    assert str(spec_file.where("precision", "tf32")) == "base.yaml:6:29"
    assert str(spec_file.where("fail_on_warning", 1)) == "spec.yaml:3:1"


def test_the_last_of_several_extended_files_wins(load):
    spec = load("extends: [base.yaml, other.yaml]\n", base=GOOD, other="name: other\n").spec

    assert spec.name == "other"


def test_extended_files_extend_further_and_name_files_from_their_own_folder(load, tmp_path):
    spec_file = load(
        "extends: sub/middle.yaml\nname: top\n",
        sub__middle="extends: ../far/base.yaml\noutput: built\n",
        far__base=GOOD,
    )

    assert spec_file.spec.name == "top"
    assert spec_file.spec.model.onnx == tmp_path / "far" / "net.onnx"
    assert spec_file.spec.output == tmp_path / "sub" / "built"


def test_the_default_output_is_in_the_folder_of_the_spec_itself(load, tmp_path):
    assert load("extends: sub/base.yaml\n", sub__base=GOOD).spec.output == tmp_path / "dist"


def test_a_problem_in_an_extended_file_stands_there(lines):
    assert lines("extends: base.yaml\nname: 'a b'\n", base=GOOD.replace("sm86", "~")) == [
        "base.yaml:5:36: error: targets[0].gpus[0]: found nothing, expected text",
        f"spec.yaml:2:1: error: name: found 'a b', {_AS_FILE_NAME}",
    ]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"spec": "extends: spec.yaml"}, "spec.yaml:1:1: error: spec.yaml extends itself"),
        ({"spec": "extends: a.yaml", "a": "extends: spec.yaml"}, "a.yaml:1:1: error: spec.yaml extends itself"),
        ({"spec": f"{GOOD}extends:\n- a.yaml\n- b.yaml", "a": "name: a"}, "spec.yaml:8:3: error: b.yaml: No such file"),
        ({"spec": "extends: a.yaml", "a": "- x"}, "spec.yaml:1:1: error: a.yaml holds no keys to extend"),
        ({"spec": "extends: a.yaml", "a": "\b"}, "spec.yaml:1:1: error: a.yaml is no text, expected a YAML spec"),
        ({"spec": "extends: a.yaml", "a": "x: ["}, "a.yaml:1:5: error: not YAML"),
        ({"spec": "extends: ."}, "spec.yaml:1:1: error: .: Is a directory"),
        ({"spec": "extends: ''"}, "spec.yaml:1:1: error: found '' in 'extends', expected a path"),
        (
            {"spec": "extends: ~nobody-of-that-name/a.yaml"},
            "spec.yaml:1:1: error: ~nobody-of-that-name/a.yaml: No such",
        ),
        ({"spec": f"extends: {'a' * 5000}"}, "spec.yaml:1:1: error: aaa"),
    ],
)
def test_extends_that_leads_nowhere_is_named_where_it_is_written(lines, files, expected):
    text = files.pop("spec")
    (line,) = lines(text, **files)

    assert line.startswith(expected)


def test_a_long_chain_of_files_is_refused(lines):
    chain = {f"f{n}": f"extends: f{n + 1}.yaml\n" for n in range(30)}

    assert lines("extends: f0.yaml\n", **chain)[0].endswith("is the 11th file in a chain of 'extends'")


def test_two_branches_may_share_a_base(load):
    shared = {"a": "extends: base.yaml\n", "b": "extends: base.yaml\nname: b\n", "base": GOOD}

    assert load("extends: [a.yaml, b.yaml]\n", **shared).spec.name == "b"


# C64: paths.


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("m.onnx", "HERE/m.onnx"),
        ("../m.onnx", "HERE/../m.onnx"),
        ("$HOME/m.onnx", "HERE/$HOME/m.onnx"),
        ("~/m.onnx", "<home>/m.onnx"),
        ("~nobody-of-that-name/m", "HERE/~nobody-of-that-name/m"),
        ("/abs/m.onnx", "/abs/m.onnx"),
        ("2024", "HERE/2024"),
        ("1.50", "HERE/1.50"),
    ],
)
@pytest.mark.parametrize("where_from", ["root", "folder", "link"])
def test_paths_are_found_from_the_folder_of_the_spec(tmp_path, monkeypatch, written, expected, where_from):
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "spec.yaml").write_text(f"{GOOD.replace('net.onnx', written)}output: {written}\n")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "link.yaml").symlink_to(folder / "spec.yaml")
    monkeypatch.setenv("HOME", "/home/someone")
    start, path = {
        "root": (Path("/"), folder / "spec.yaml"),
        "folder": (folder, Path("spec.yaml")),
        "link": (tmp_path / "links", Path("link.yaml")),
    }[where_from]
    monkeypatch.chdir(start)

    spec = load_spec(path).spec

    assert str(spec.model.onnx) == expected.replace("HERE", str(folder)).replace("<home>", "/home/someone")
    assert spec.output == spec.model.onnx


def test_a_link_that_points_at_itself_is_an_error(tmp_path):
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")

    with pytest.raises(SpecError):
        load_spec(tmp_path / "loop.yaml")


# Digests.


def _digest(tmp_path_factory, text, folder="digests"):
    path = tmp_path_factory.getbasetemp() / folder / "spec.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return load_spec(path).digest


def test_comments_layout_and_folder_are_not_part_of_the_digest(tmp_path_factory):
    block = GOOD.replace("{onnx: net.onnx}", "\n  onnx: 'net.onnx'  # comment").replace("\n", "\r\n")

    assert _digest(tmp_path_factory, GOOD) == _digest(tmp_path_factory, block, folder="elsewhere")


def test_a_spec_split_over_files_has_the_digest_of_the_whole(load, tmp_path_factory):
    split = load("extends: base.yaml\nname: net\n", base=GOOD.replace("name: net", "name: other"))

    assert split.digest == _digest(tmp_path_factory, GOOD)


FULL_VALUES = {
    "version": 1,
    "name": "net",
    "model": {"onnx": "models/net.onnx"},
    "inputs": {"ids": {"kind": "token_ids", "range": [0, 99]}},
    "profiles": [{"name": "chat", "inputs": {"ids": {"min": [1, 16], "opt": "8x64", "max": [32, 128]}, "y": [1]}}],
    "precision": {"type": "fp32", "tf32": True},
    "builder": {"optimization_level": 4, "workspace_mib": 512},
    "fail_on_warning": ["*INT64*"],
    "targets": [{"backend": "tensorrt", "gpus": ["T4", "A100"], "version": "10.1"}],
    "output": "out",
}


def _shuffled(value, draw):
    if isinstance(value, dict):
        return {name: _shuffled(value[name], draw) for name in draw(st.permutations(sorted(value)))}
    return [_shuffled(item, draw) for item in value] if isinstance(value, list) else value


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_the_order_of_keys_is_not_part_of_the_digest(tmp_path_factory, data):
    shuffled = json.dumps(_shuffled(FULL_VALUES, data.draw))

    assert _digest(tmp_path_factory, shuffled) == _digest(tmp_path_factory, json.dumps(FULL_VALUES))


def _leaves(value, path=()):
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [leaf for key, item in pairs for leaf in _leaves(item, (*path, key))]
    return [path]


_OTHER_VALUES = {
    "version": [],
    "backend": ["tensorrt_rtx"],
    "kind": ["mask", "image"],
    "type": ["as_model", "int8"],
    "opt": ["8x65"],
    "tf32": [False],
}


@pytest.mark.parametrize("path", _leaves(FULL_VALUES), ids=lambda path: ".".join(map(str, path)))
def test_every_value_is_part_of_the_digest(tmp_path_factory, path):
    changed = json.loads(json.dumps(FULL_VALUES))
    *parents, last = path
    holder = changed
    for part in parents:
        holder = holder[part]
    default = [holder[last] + 1] if isinstance(holder[last], int) else [f"{holder[last]}0"]
    digests = [_digest(tmp_path_factory, json.dumps(FULL_VALUES))]
    for other in _OTHER_VALUES.get(last, default):
        holder[last] = other
        digests.append(_digest(tmp_path_factory, json.dumps(changed)))

    assert len(set(digests)) == len(digests)


@settings(deadline=None)
@given(*[st.tuples(st.integers(-50, 50), st.integers(51, 99)) for _ in range(2)])
def test_equal_values_and_only_they_have_equal_digests(tmp_path_factory, one, other):
    first, second = (
        _digest(tmp_path_factory, f"{GOOD}inputs: {{x: {{range: [{low}, {high}]}}}}\n") for low, high in (one, other)
    )

    assert (first == second) == (one == other)


def test_versions_that_look_alike_as_numbers_have_different_digests(tmp_path_factory):
    targets = [GOOD.replace("gpus:", f"version: {version}, gpus:") for version in ("10.1", "10.10")]

    assert len({_digest(tmp_path_factory, text) for text in targets}) == 2


# Anything at all.

_ODD_VALUES = (
    *("", "~", "true", "-1", "1e400", ".nan", "9" * 50, "FILL_IN", "[]", "{}", "[[]]", "{a: {b: [1]}}", "x" * 300),
    *("'\\'", '"\\0"', "~nobody/x", "*pixels", "&pixels", "{<<: *pixels}", "!!int 5", "0x", "\t", "1x2", "a: b: c"),
    *("{backend: tensorrt_rtx, gpus: 5}", "[{inputs: {x: {values: [1]}}}]", "tensorrt", "{tensorrt: {gpus: 1}}"),
)


@st.composite
def _mutated(draw):
    """FULL with some of its tokens replaced, dropped or doubled."""
    tokens = FULL.replace("\n", " \n ").split(" ")
    for _ in range(draw(st.integers(1, 3))):
        position = draw(st.integers(0, len(tokens) - 1))
        tokens[position : position + 1] = draw(
            st.one_of(
                st.sampled_from(_ODD_VALUES).map(lambda text: [text]), st.just([]), st.just([tokens[position]] * 2)
            )
        )
    return " ".join(tokens).replace(" \n ", "\n")


@settings(deadline=None, max_examples=300)
@given(st.one_of(_mutated(), st.text(max_size=80).map(lambda text: f"{GOOD}{text}")))
def test_any_text_gives_a_spec_or_an_error_with_a_next_step(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "fuzz-spec.yaml"
    path.write_bytes(text.encode())

    spec_file, problems = _outcome(path)

    assert (spec_file is None) == bool(problems)
    for problem in problems:
        assert problem.exit_code == 2
        assert problem.summary
        assert problem.next_step
        assert len(problem.next_step) < 400
        assert all(line.isprintable() for line in problem.lines())
    if spec_file:
        assert isinstance(spec_file.spec, BuildSpec)
        assert spec_file.spec.output.is_absolute()
        assert spec_file.spec.model.onnx.is_absolute()
        assert len(spec_file.digest) == 64


def _outcome(path):
    try:
        return load_spec(path), ()
    except TrtForgeError as error:
        return None, error.problems
