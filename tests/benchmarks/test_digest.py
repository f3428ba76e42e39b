"""The digest that says whether a result belongs to the present sources."""

from pathlib import Path

import pytest

from benchmarks.common.digest import source_digest


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


@pytest.mark.parametrize(
    "name", ["csrc/common/layout.h", "csrc/cuda/norm.cu", "photon_ext/runtime/slot.py"]
)
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


def test_digest_ignores_comments_and_layout_of_cpp(tree: Path) -> None:
    kernel = tree / "csrc/cuda/norm.cu"
    kernel.write_text("""int f(char c) { return c == '"' ? 1 : g("// no comment"); }\n""")
    before = source_digest(tree)
    kernel.write_text(
        """// A comment's quote.\nint f(char c) {  /* two\nlines */\n"""
        """  return c == '"' ? 1 : g("// no comment");  // "\n}\n"""
    )
    assert source_digest(tree) == before
    kernel.write_text("""int f(char c) { return c == '"' ? 1 : g("// no  comment"); }\n""")
    literal = source_digest(tree)
    kernel.write_text("""int f(char c) { return c == '"' ? 1 : g("// no comment"); } int i;\n""")
    assert len({before, literal, source_digest(tree)}) == 3


PLAIN = """\
from x import y

class A:
    b = 1

    def f(self):
        return f"# {y}" + (
            "in brackets"
        )
y("an argument")
"""

REMARKED = '''\
#!/usr/bin/env python3
"""What it is.

Of two lines."""  # noqa

from x import y

# ä before "A"
class A:
    r"""A class."""

    b = 1  # and its only member
    """of an attribute"""

    def f(self):
        # a comment
        """A function."""

        return f"# {y}" + (  # a sum
            "in brackets"  # of strings
            # alone
        )


# a heading

y("an argument")
'''


def test_digest_ignores_comments_and_docstrings_of_python(tree: Path) -> None:
    path = tree / "photon_ext/ops.py"
    path.write_text(PLAIN)
    before = source_digest(tree)
    path.write_text(REMARKED)
    assert source_digest(tree) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# {y}", "#  {y}"),
        ("in brackets", "in  brackets"),
        ("b = 1", "b = 2"),
        ("an argument", "# argument"),
        ("(self)", "()"),
    ],
)
def test_digest_ignores_nothing_else_of_python(tree: Path, old: str, new: str) -> None:
    path = tree / "photon_ext/ops.py"
    path.write_text(PLAIN)
    before = source_digest(tree)
    path.write_text(PLAIN.replace(old, new))
    assert source_digest(tree) != before


def test_digest_takes_a_string_that_does_something_for_code(tree: Path) -> None:
    path = tree / "photon_ext/ops.py"
    digests = set()
    for text in (
        'f"{x}"\n',
        'f"{y}"\n',
        '"a".join(x)\n',
        '"b".join(x)\n',
        'x = 1\n("a")\n',
        'x = """\n\n# 1"""\n',
        'x = """\n# 1"""\n',
    ):
        path.write_text(text)
        digests.add(source_digest(tree))
    assert len(digests) == 7


def test_digest_ignores_what_is_built(tree: Path) -> None:
    before = source_digest(tree)
    (tree / "photon_ext/_build_info.py").write_text("another machine\n")
    (tree / "photon_ext/_ops.abi3.so").write_bytes(b"binary")
    assert source_digest(tree) == before
