"""What is known of a chat template before it is rendered: where its generation header begins, so that one rendering tells the
prompt with it and without, and the texts that it writes as they stand.

Most templates write it at their very end, `{% if add_generation_prompt %}…{% endif %}`, and ask for it nowhere else: what
comes before is then the prompt without it.
"""

from __future__ import annotations

import secrets
from typing import Final

from jinja2 import Environment, nodes

HERE: Final = f"\ue0f3{secrets.token_hex(16)}"
"""The piece that a marked template yields before its header. Nobody can write it: it is new in each process."""

ASKED: Final = "add_generation_prompt"
"""The variable by which a template is asked for its header."""


def mark(tree: nodes.Template, environment: Environment) -> bool:
    """Let a template yield `HERE` before its header. False of one that does more with the question than this: it stays as it
    is."""
    header = tree.body[-1] if tree.body else None
    asked = [name for name in tree.find_all(nodes.Name) if name.name == ASKED]
    if not isinstance(header, nodes.If) or header.elif_ or header.else_ or asked != [header.test]:
        return False
    here = nodes.Output([nodes.TemplateData(HERE, lineno=header.lineno)], lineno=header.lineno)
    tree.body.insert(-1, here.set_environment(environment))
    return True


def texts_of(environment: Environment, source: str) -> frozenset[str]:
    """The texts of a template: what it writes between its blocks, and its string constants."""
    tree = environment.parse(source)
    written = {data.data for data in tree.find_all(nodes.TemplateData)}
    return frozenset(
        written | {const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)}
    )
