"""The pages of the API, as Markdown for mkdocstrings, and their place in the menu."""

from typing import Any

from docs.site import api


def menu() -> list[Any]:
    """The menu: a submenu for each part of the package with several pages."""
    entries: list[Any] = ["api/index.md"]
    parts: dict[str, list[Any]] = {}
    for page in api.pages():
        entry = {page.title: _path(page)}
        part = _part(page)
        if part is None:
            entries.append({api.shown(page.module, "").rstrip("."): _path(page)})
        elif part in parts:
            parts[part].append(entry)
        else:
            parts[part] = [entry]
            entries.append({part: parts[part]})
    return entries


def files() -> dict[str, str]:
    """The Markdown of each page, by path."""
    pages = api.pages()
    return {"api/index.md": _index(pages)} | {_path(page): _markdown(page) for page in pages}


def _part(page: api.Page) -> str | None:
    names = [
        name for name in api.PARTS if page.module == name or page.module.startswith(f"{name}.")
    ]
    if page.module == api.PACKAGE:
        return api.PARTS[api.PACKAGE]
    names = [name for name in names if name != api.PACKAGE]
    return api.PARTS[names[0]] if names else None


def _path(page: api.Page) -> str:
    return f"api/{page.path}.md"


def _markdown(page: api.Page) -> str:
    lines = [f"# {page.title}", "", *_where(page)]
    for title, names in page.sections.items():
        if title:
            lines += [f"## {title}", ""]
        for name in names.split():
            lines += _entry(page.module, name)
    return "\n".join(lines)


def _where(page: api.Page) -> list[str]:
    if page.module == api.PACKAGE:
        return ["`import eqxlike as eqx`", ""]
    parent, _, name = page.module.rpartition(".")
    return [f"`from {parent} import {name}`", ""]


def _entry(module: str, name: str) -> list[str]:
    shown, home = api.shown(module, name), api.home(module, name)
    if home != (module, name):
        return [
            f"### {shown} {{ #{module}.{name} .doc-heading data-toc-label='{name}' }}",
            "",
            f"This is [`{api.shown(*home)}`][{'.'.join(home)}].",
            "",
        ]
    return [
        f"::: {module}.{name}",
        "    options:",
        f'      heading: "{shown}"',
        f'      toc_label: "{name}"',
        "",
    ]


def _index(pages: list[api.Page]) -> str:
    lines = [
        "# All names",
        "",
        "This page lists every public name. You can also search for a name above.",
        "",
    ]
    for page in pages:
        lines += [f"## [{_heading(page)}]({_path(page).removeprefix('api/')})", ""]
        lines += ["| name | description |", "| --- | --- |"]
        for names in page.sections.values():
            for name in names.split():
                said = api.summary(page.module, name).replace("|", "\\|")
                lines.append(
                    f"| [`{api.shown(page.module, name)}`][{page.module}.{name}] | {said} |"
                )
        lines.append("")
    return "\n".join(lines)


def _heading(page: api.Page) -> str:
    part = _part(page)
    return f"{part}: {page.title.lower()}" if part else page.title
