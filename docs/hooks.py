"""Hooks of the documentation site.

Equations become MathML, which browsers draw without scripts or fonts. Sphinx roles of docstrings become links.
"""
import re
from typing import List

from latex2mathml.converter import convert

_CODE = re.compile(r'(```.*?```|`[^`\n]+`)', re.DOTALL)
_EQUATION = re.compile(r'\$\$(?P<block>.+?)\$\$|(?<![\\$\w])\$(?!\s)(?P<inline>[^$\n]+?)(?<!\s)\$(?![\w$])', re.DOTALL)
_PLACE = 'EQUATION{}PLACE'
_ROLE = re.compile(r':(?:attr|class|func|meth|mod):<code>~?([\w.]+)</code>')

_equations: List[str] = []


def on_page_markdown(markdown: str, **kwargs) -> str:
    """Take ``$...$`` and ``$$...$$`` outside code away from the Markdown parser."""
    _equations.clear()

    def take(match: re.Match) -> str:
        equation = convert(match[match.lastgroup].strip(), display=match.lastgroup)
        # wide ones scroll by themselves on a phone, see extra.css
        _equations.append(
            f'<span class="equation">{equation}</span>' if match.lastgroup == 'block' else equation)
        return _PLACE.format(len(_equations) - 1)

    parts = _CODE.split(markdown)
    for i in range(0, len(parts), 2):  # code has odd indices
        parts[i] = _EQUATION.sub(take, parts[i])
    return ''.join(parts)


def on_page_content(html: str, **kwargs) -> str:
    """Put the equations in, link roles to the reference, and keep means and deviations of tables on one line."""
    for i, equation in enumerate(_equations):
        html = html.replace(_PLACE.format(i), equation)
    html = _ROLE.sub(r'<autoref identifier="\1" optional><code>\1</code></autoref>', html)
    return html.replace(' ± ', '&nbsp;±&nbsp;')
