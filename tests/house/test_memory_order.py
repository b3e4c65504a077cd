"""docs/memory_order.md has every atomic object of the core."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone
ROOT = Path(__file__).resolve().parents[2]

DECLARED = re.compile(
    r"\*_Atomic (\w+)"
    r"|_Atomic\([^)]*\) (\w+)"
    r"|\b_Atomic (?:enum |struct )?\w+ (\w+)[;\[ =]"
    r"|\batomic_(?:bool|int|long|u?int_least64_t) (\w+)"
)


def _declared(text):
    return {name for match in DECLARED.findall(text) for name in match if name}


def test_page_has_all():
    page = (ROOT / "docs" / "memory_order.md").read_text()
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".c", ".h")]
    names = set().union(*(_declared(path.read_text()) for path in sources))
    assert len(names) > 40
    assert not {name for name in names if f"`{name}`" not in page}
