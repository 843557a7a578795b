"""Hooks of the documentation site: equations become MathML, which browsers draw without scripts or fonts."""
import re
from typing import List

from latex2mathml.converter import convert

_CODE = re.compile(r'(```.*?```|`[^`\n]+`)', re.DOTALL)
_EQUATION = re.compile(r'\$\$(?P<block>.+?)\$\$|(?<![\\$\w])\$(?!\s)(?P<inline>[^$\n]+?)(?<!\s)\$(?![\w$])', re.DOTALL)
_PLACE = 'EQUATION{}PLACE'

_equations: List[str] = []


def on_page_markdown(markdown: str, **kwargs) -> str:
    """Take ``$...$`` and ``$$...$$`` outside code away from the Markdown parser."""
    _equations.clear()

    def take(match: re.Match) -> str:
        _equations.append(convert(match[match.lastgroup].strip(), display=match.lastgroup))
        return _PLACE.format(len(_equations) - 1)

    parts = _CODE.split(markdown)
    for i in range(0, len(parts), 2):  # code has odd indices
        parts[i] = _EQUATION.sub(take, parts[i])
    return ''.join(parts)


def on_page_content(html: str, **kwargs) -> str:
    """Put the equations in as MathML."""
    for i, equation in enumerate(_equations):
        html = html.replace(_PLACE.format(i), equation)
    return html
