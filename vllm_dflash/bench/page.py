# SPDX-License-Identifier: Apache-2.0
"""One HTML page that is complete in itself: no script, no font, no image and no request."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape as escape

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px; max-width: 1240px; color: #1a1a1a; background: #fff;
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .3em 0; }
h2 { font-size: 1.2rem; margin: 1.6em 0 .5em; border-bottom: 1px solid #ccc; }
.plots { display: grid; gap: 16px; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr)); }
figure { margin: 0; padding: 8px; border: 1px solid #ddd; border-radius: 6px; min-width: 0; }
figcaption { font-weight: 600; }
svg.plot { display: block; width: 100%; height: auto; }
svg.plot text { font: 13px system-ui, sans-serif; fill: #1a1a1a; }
polyline { stroke-width: 2.5; }
.axis { stroke: #333; } .grid { stroke: #e4e4e4; } .level { stroke: #555; stroke-dasharray: 4 3; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: .875rem; }
.legend svg { margin-right: 5px; vertical-align: middle; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { background: #f3f3f3; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 0; }
dt { font-weight: 600; } dd { margin: 0; min-width: 0; }
@media (max-width: 480px) { dl { grid-template-columns: 1fr; } dd { margin-bottom: 6px; } }
pre { overflow-x: auto; background: #f6f6f6; padding: 8px; white-space: pre-wrap; }
"""


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """The whole document: `sections` are (heading, HTML); a heading may be empty."""
    body = "".join((f"<h2>{escape(heading)}</h2>" if heading else "") + html for heading, html in sections if html)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main><h1>{escape(title)}</h1>{body}</main></body></html>\n"
    )


def plots(figures: Sequence[str]) -> str:
    """Figures beside each other where there is room; empty ones are left out."""
    drawn = "".join(figure for figure in figures if figure)
    return f'<div class="plots">{drawn}</div>' if drawn else ""


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table that scrolls by itself where it is too wide."""
    if not rows:
        return ""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(pairs: Sequence[tuple[str, object]]) -> str:
    """Names and values, one below the other on a narrow screen."""
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in pairs) + "</dl>"
