"""Rules of the broker that its code must keep."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from services import cache_broker
from services.cache_broker.tracing import name_of

FOLDER = Path(cache_broker.__file__).parent
ENDS = {"commit", "rollback", "begin", "begin_nested"}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_only_the_database_module_begins_and_ends_transactions(file: Path) -> None:
    """One that ended early would leave the ledger and the counter apart for a moment (C5)."""
    calls = {
        node.func.attr
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ENDS
        and not (isinstance(node.func.value, ast.Name) and node.func.value.id in ("catalogue", "drain"))
    }
    assert calls == ({"begin"} if file.name == "database.py" else set())


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("SELECT a, b \nFROM entries WHERE x", "SELECT entries"),
        ("UPDATE quotas SET used_bytes=1", "UPDATE quotas"),
        ("INSERT INTO leases (id) VALUES (1)", "INSERT leases"),
        ("DELETE FROM ledger WHERE x", "DELETE ledger"),
        ("SELECT pg_sleep(1)", "SELECT"),
        ("", "SQL"),
    ],
)
def test_a_statements_span_has_a_name_of_few_values(statement: str, name: str) -> None:
    assert name_of(statement) == name
