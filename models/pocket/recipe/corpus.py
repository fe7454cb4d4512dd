"""Free text for the base stage: Debian documentation packages with permissive licences, as plain text.

Fetches by `apt-get download`, unpacks with `dpkg -x`, strips the HTML and writes one JSON line a page. A page is held
out for evaluation when the hash of its path says so, so a page never changes sides between two runs. The corpus is not
committed; MODEL_CARD.md records package versions and licences.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

WORK: Final = Path(__file__).parent / ".work"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One documentation package. `skip` matches paths that are lists, sources or notes rather than prose."""

    package: str
    licence: str
    skip: str


SOURCES: Final = (
    Source(
        package="python3.11-doc",
        licence="PSF-2.0",
        skip=r"genindex|_sources|search|py-modindex|changelog\.html",
    ),
    Source(
        package="postgresql-doc-15", licence="PostgreSQL", skip=r"bookindex|release-|features-sql|errcodes"
    ),
    Source(
        package="sqlite3-doc",
        licence="public domain",
        skip=r"releaselog/|keyword|toc\.html|docs\.html|matrix",
    ),
    Source(
        package="python-django-doc",
        licence="BSD-3-Clause",
        skip=r"_modules|genindex|py-modindex|search|_sources",
    ),
    Source(
        package="python-sqlalchemy-doc", licence="MIT", skip=r"_modules|genindex|search|_sources|changelog_0"
    ),
)

_DROP: Final = {"script", "style", "nav", "head", "svg", "footer", "form"}
_VOID: Final = {"br", "hr", "img", "input", "link", "meta", "col", "wbr", "area", "base", "source"}
_BLOCK: Final = {
    "p",
    "div",
    "li",
    "tr",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "pre",
    "dt",
    "dd",
    "table",
    "br",
    "section",
}
_CHROME: Final = re.compile(
    r"sphinxsidebar|related|navheader|navfooter|headerlink|footer|menu|toctree|searchbox|fancy_toc"
)


class _Text(HTMLParser):
    """Collects visible text; drops navigation, scripts and the page frame of the four documentation tools."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.out: list[str] = []
        self._stack: list[tuple[str, bool, bool]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _BLOCK:
            self.out.append("\n")
        if tag in _VOID:
            return
        dropped, pre = (self._stack[-1][1], self._stack[-1][2]) if self._stack else (False, False)
        names = " ".join(value or "" for key, value in attrs if key in ("class", "id", "role"))
        self._stack.append((tag, dropped or tag in _DROP or bool(_CHROME.search(names)), pre or tag == "pre"))

    def handle_endtag(self, tag: str) -> None:
        for depth in range(len(self._stack) - 1, -1, -1):
            if self._stack[depth][0] == tag:
                del self._stack[depth:]
                break
        if tag in _BLOCK:
            self.out.append("\n")

    def handle_data(self, data: str) -> None:
        dropped, pre = (self._stack[-1][1], self._stack[-1][2]) if self._stack else (False, False)
        if not dropped:
            self.out.append(data if pre else re.sub(r"\s+", " ", data))


def html_to_text(html: str) -> str:
    """Plain text of one page: blocks on their own lines, at most one empty line in a row."""
    parser = _Text()
    parser.feed(html)
    text = "".join(parser.out).replace("\u00b6", "").replace("\u00a0", " ").replace("\u2019", "'")
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n +(?=[A-Z])", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def is_held_out(name: str) -> bool:
    """One page in 33 is for evaluation only, chosen by its name."""
    return hashlib.sha256(name.encode()).digest()[0] < 8


def fetch(source: Source) -> tuple[Path, str]:
    """Downloads and unpacks one package; returns its documentation root and version. Needs apt and dpkg."""
    debs = WORK / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    found = sorted(debs.glob(f"{source.package}_*.deb"))
    if not found:
        subprocess.run(["apt-get", "download", source.package], cwd=debs, check=True, capture_output=True)
        found = sorted(debs.glob(f"{source.package}_*.deb"))
    root = WORK / "x" / source.package
    if not root.exists():
        root.mkdir(parents=True)
        subprocess.run(["dpkg", "-x", str(found[-1]), str(root)], check=True)
    return root, found[-1].name.split("_")[1].replace("%3a", ":")


def pages(source: Source) -> list[tuple[str, str]]:
    """(name, text) of every page that is prose, in a fixed order."""
    root, _ = fetch(source)
    result: list[tuple[str, str]] = []
    for path in sorted(root.rglob("*.html")):
        name = f"{source.package}/{path.relative_to(root)}"
        if re.search(source.skip, name) or path.is_symlink():
            continue
        text = html_to_text(path.read_text("utf-8", errors="replace"))
        if len(text) > 400:
            result.append((name, text))
    return result


def main() -> None:
    """Writes .work/corpus_{train,heldout}.jsonl and prints the sizes."""
    seen: set[str] = set()
    manifest = []
    with (WORK / "corpus_train.jsonl").open("w") as train, (WORK / "corpus_heldout.jsonl").open("w") as held:
        for source in SOURCES:
            count = chars = 0
            for name, text in pages(source):
                digest = hashlib.sha256(text.encode()).hexdigest()
                if digest in seen:
                    continue
                seen.add(digest)
                (held if is_held_out(name) else train).write(json.dumps({"name": name, "text": text}) + "\n")
                count, chars = count + 1, chars + len(text)
            version = fetch(source)[1]
            manifest.append(
                {
                    "package": source.package,
                    "version": version,
                    "licence": source.licence,
                    "pages": count,
                    "characters": chars,
                }
            )
            print(manifest[-1], flush=True)
    (WORK / "corpus_manifest.json").write_text(json.dumps(manifest, indent=1))


if __name__ == "__main__":
    main()
