"""The digest that says whether a result belongs to the present sources."""

from pathlib import Path

import pytest

from benchmarks.common.env import environment, source_digest


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "csrc/common/layout.h",
        "csrc/cuda/norm.cu",
        "photon_ext/ops.py",
        "photon_ext/runtime/slot.py",
        "photon_ext/_build_info.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"content of {name}\n")
    return tmp_path


@pytest.mark.parametrize("name", ["csrc/common/layout.h", "csrc/cuda/norm.cu", "photon_ext/runtime/slot.py"])
def test_digest_changes_with_any_source(tree: Path, name: str) -> None:
    before = source_digest(tree)
    assert source_digest(tree) == before
    (tree / name).write_text("changed\n")
    assert source_digest(tree) != before


def test_digest_changes_when_a_source_is_renamed_or_added(tree: Path) -> None:
    before = source_digest(tree)
    (tree / "csrc/cuda/norm.cu").rename(tree / "csrc/cuda/rms.cu")
    renamed = source_digest(tree)
    (tree / "photon_ext/extra.py").write_text("")
    assert len({before, renamed, source_digest(tree)}) == 3


def test_digest_ignores_comments_and_layout_of_cpp_alone(tree: Path) -> None:
    kernel, python = tree / "csrc/cuda/norm.cu", tree / "photon_ext/ops.py"
    kernel.write_text("""int f(char c) { return c == '"' ? 1 : g("// no comment"); }\n""")
    before = source_digest(tree)
    kernel.write_text(
        """// A comment's quote.\nint f(char c) {  /* two\nlines */\n  return c == '"' ? 1 : g("// no comment");  // "\n}\n"""
    )
    assert source_digest(tree) == before
    kernel.write_text("""int f(char c) { return c == '"' ? 1 : g("// no  comment"); }\n""")
    literal = source_digest(tree)
    kernel.write_text("""int f(char c) { return c == '"' ? 1 : g("// no comment"); } int i;\n""")
    assert len({before, literal, source_digest(tree)}) == 3
    kernel.write_text("""int f(char c) { return c == '"' ? 1 : g("// no comment"); }\n""")
    python.write_text(python.read_text() + "# a comment\n")
    assert source_digest(tree) != before


def test_digest_ignores_what_is_built(tree: Path) -> None:
    before = source_digest(tree)
    (tree / "photon_ext/_build_info.py").write_text("another machine\n")
    (tree / "photon_ext/_ops.abi3.so").write_bytes(b"binary")
    assert source_digest(tree) == before


def test_environment_of_a_tree_without_git_still_has_its_digest(tree: Path) -> None:
    found = environment(tree)
    assert found["commit"] is None
    assert found["dirty"] is None
    assert found["sources"] == source_digest(tree)
    assert found["torch"]
