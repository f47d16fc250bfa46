"""HTML as text in which everything is escaped that isn't markup already."""

from __future__ import annotations

from html import escape

_VOID = ("meta", "link", "input", "br", "col")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. Children that aren't Markup are escaped; None is left out, lists are joined. class_ is class, other
    underscores are hyphens; an attribute that is None or False is left out, and True has no value."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: object) -> Markup:
    """Children one after the other."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, list | tuple):
            parts.append(join(*child))
        elif child is not None:
            parts.append(child if isinstance(child, Markup) else escape(str(child)))
    return Markup("".join(parts))
