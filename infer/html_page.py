"""Results as one file that a browser shows: what was printed, and the plots, nothing to fetch."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from infer.output import write_whole

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font-family: system-ui, sans-serif; color: #22304a; margin: 2rem auto; max-width: 70rem;
       padding: 0 1rem; }}
pre {{ overflow-x: auto; font-size: 0.85rem; line-height: 1.35; background: #f6f7f9;
      padding: 1rem; }}
figure {{ margin: 2rem 0; }}
img {{ max-width: 100%; }}
figcaption {{ font-size: 0.85rem; color: #5b6780; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{about}</p>
<pre>{text}</pre>
{figures}
</body>
</html>
"""


def html_page(title: str, about: str, text: str, plots: Sequence[Path]) -> str:
    """The page: a paragraph, printed tables as they are, and PNG files inside of it."""
    figures = [
        f'<figure><img alt="{html.escape(plot.stem)}" src="data:image/png;base64,'
        f'{base64.b64encode(plot.read_bytes()).decode()}">'
        f"<figcaption>{html.escape(plot.stem.replace('_', ' '))}</figcaption></figure>"
        for plot in plots
    ]
    return _PAGE.format(
        title=html.escape(title),
        about=html.escape(about),
        text=html.escape(text),
        figures="\n".join(figures),
    )


def write_page(path: Path, title: str, about: str, text: str, plots: Sequence[Path]) -> None:
    """Writes the page, whole or not at all; FailedError where it cannot be written."""
    write_whole(path, html_page(title, about, text, plots).encode())
