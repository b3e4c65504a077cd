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


def test_declarations_are_found():
    text = """
    static struct communicator *_Atomic expected, *_Atomic alone;
    static void (*_Atomic program_is_at)(char *text, size_t size);
    _Atomic(const char *) why; _Atomic enum action action; _Atomic int64_t summary[WORDS];
    extern atomic_int counted; atomic_store((atomic_bool *)member, on); void count_more(atomic_int *number);
    static struct request *_Atomic spares[SPARE_REQUESTS];
    """
    assert _declared(text) == {
        *("expected", "alone", "program_is_at", "why", "action", "summary", "counted", "spares"),
    }


def test_page_has_all():
    page = (ROOT / "docs" / "memory_order.md").read_text()
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".c", ".h")]
    names = set().union(*(_declared(path.read_text()) for path in sources))
    assert len(names) > 40
    assert not {name for name in names if f"`{name}`" not in page}
