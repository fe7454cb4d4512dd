"""Documents say what the code says: links and paths exist, and tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec import UNSET, Struct, structs

from services.gateway import faults
from services.gateway.config import GatewaySettings
from services.gateway.schemas.chat import ChatRequest
from services.gateway.schemas.completions import CompletionRequest
from shared import errors
from shared.protocol import messages, subjects
from shared.protocol.codec import MESSAGES

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "kernels", "models", "services", "shared", "tests")
DOCUMENTS = sorted(
    {*ROOT.glob("*.md"), *(path for top in FOLDERS for path in (ROOT / top).rglob("*.md") if path.is_file())}
)
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
GATEWAY = (ROOT / "docs" / "gateway.md").read_text(encoding="utf-8")

_LINK = re.compile(r"\]\(([^)#:\s]+)\)")
_PATH = re.compile(r"`((?:services|shared|kernels|models|tests|docs|deploy|scripts)/[\w./-]+)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    missing = [link for link in _LINK.findall(text) if not (document.parent / link).exists()]
    missing += [path for path in _PATH.findall(text) if not (ROOT / path).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_that_are_named_exist(document: Path) -> None:
    named = set(re.findall(r"\btest_\w+\b(?!…)", document.read_text(encoding="utf-8")))
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if named]
    there = {path.stem for path in files}
    for path in files:
        there |= set(re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8")))
    assert named - there == set()


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "adr"
    decisions = {path.name for path in folder.glob("0*.md")}
    assert decisions == {link for link in _LINK.findall((folder / "README.md").read_text()) if link[0] == "0"}
    assert all("**Held by.**" in (folder / name).read_text() for name in decisions)


def test_r_protocol_every_message_is_in_the_table() -> None:
    assert set(MESSAGES) <= set(re.findall(r"`(\w+)`", PROTOCOL))


def test_r_protocol_every_field_that_may_be_absent_is_in_the_table() -> None:
    parts = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Struct)]
    late = {
        f"{kind.__name__}.{field.name}"
        for kind in parts
        for field in structs.fields(kind)
        if field.default is UNSET
    }
    assert late == set(re.findall(r"^\| `(\w+\.\w+)`", PROTOCOL.partition("## Changing it")[2], re.MULTILINE))


def test_r_protocol_every_subject_is_in_the_table() -> None:
    head = (subjects.__doc__ or "").split("\n\n")[1]
    listed = [line.split()[0] for line in head.splitlines()]
    assert len(listed) == 11
    assert [name for name in listed if f"`{name}`" not in PROTOCOL] == []


def test_r_protocol_every_header_is_told() -> None:
    headers = [
        value
        for name, value in vars(subjects).items()
        if name.isupper() and str(value).startswith("burstline-")
    ]
    assert len(headers) == 4
    assert [name for name in headers if f"`{name}`" not in PROTOCOL] == []


@pytest.mark.parametrize("spec", subjects.STREAMS, ids=lambda spec: spec.name)
def test_r_protocol_every_stream_is_told_with_its_limits(spec: subjects.StreamSpec) -> None:
    (row,) = [line for line in PROTOCOL.splitlines() if line.startswith(f"| `{spec.name}` |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    size = spec.max_msg_bytes
    assert cells[1] == ", ".join(f"`{subject}`" for subject in spec.subjects)
    assert cells[2].startswith("work queue") == spec.work_queue
    assert ("the last of a subject" in cells[2]) == (spec.max_msgs_per_subject == 1)
    assert cells[3] == f"{spec.max_bytes >> 20} MiB"
    assert cells[4] == f"{spec.max_age_s // 3600} h"
    assert cells[5] == (f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB")


def _codes(*folders: str) -> set[str]:
    """Codes of errors that the sources of a folder spell, and of shared errors that they name."""
    found: set[str] = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            if "engine" in path.parts:
                continue
            text = path.read_text(encoding="utf-8")
            found.update(re.findall(r"\bcode ?= ?\"(\w+)\"", text))
            named = [getattr(errors, name, None) for name in re.findall(r"raise (\w+)\(", text)]
            found.update(kind.code for kind in named if kind is not None)
    return found


def test_every_error_code_is_told() -> None:
    told = set(re.findall(r"`(\w+)`", GATEWAY[GATEWAY.index("## Errors") :]))
    assert _codes("services/gateway", "services/gpu_worker") - told == set()


def test_the_statuses_of_the_table_are_those_of_the_errors() -> None:
    table = GATEWAY[GATEWAY.index("## Errors") :]
    rows = [line.strip("|").split("|") for line in table.splitlines() if re.match(r"\| \d", line)]
    status_of = {code: int(row[0]) for row in rows for code in re.findall(r"`(\w+)`", row[1])}
    kinds = [getattr(errors, name) for name in dir(errors)]
    known = {
        kind.code: kind.status
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, errors.BurstlineError)
    }
    assert [code for code, status in status_of.items() if known.get(code, status) != status] == []
    assert faults.body(errors.NotFound("x"))["error"] == {
        "message": "x", "type": "invalid_request_error", "param": None, "code": "not_found",
    }  # fmt: skip


def test_every_field_of_a_request_is_told() -> None:
    told = set(re.findall(r"`(\w+)", GATEWAY))
    assert {*ChatRequest.model_fields, *CompletionRequest.model_fields} - told == set()


def test_fr_56_the_limits_are_told() -> None:
    told = set(re.findall(r"`(\w+)`", GATEWAY))
    assert set(GatewaySettings().limits()) - told == set()
