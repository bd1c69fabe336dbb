"""README.md says which families there are, and says it of all that the tests prove."""

from __future__ import annotations

from tests.model.family_table import BEGIN, END, ROOT, readme_part


def test_the_readme_lists_the_families_that_are_proven() -> None:
    _, _, rest = (ROOT / "README.md").read_text().partition(BEGIN)
    found, end, _ = rest.partition(END)
    assert end, "README.md has no table of families"
    assert found.strip() == readme_part(), "make it anew: python -m tests.model.family_table"
