"""What identifies a run."""

from pathlib import Path

from benchmarks.common.digest import source_digest
from benchmarks.common.env import environment


def test_environment_of_a_tree_without_git_still_has_its_digest(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "norm.cu").write_text("int i;\n")
    found = environment(tmp_path)
    assert found["commit"] is None
    assert found["dirty"] is None
    assert found["sources"] == source_digest(tmp_path)
    assert found["torch"]
