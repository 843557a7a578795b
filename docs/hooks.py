"""Hooks of the documentation site: equations become MathML, which browsers draw without scripts or fonts."""
import re

from latex2mathml.converter import convert

_CODE = re.compile(r'(```.*?```|`[^`\n]+`)', re.DOTALL)
_DISPLAY = re.compile(r'\$\$(.+?)\$\$', re.DOTALL)
_INLINE = re.compile(r'(?<![\\$\w])\$(?!\s)([^$\n]+?)(?<!\s)\$(?![\w$])')


def on_page_markdown(markdown: str, **kwargs) -> str:
    """Replace ``$...$`` and ``$$...$$`` outside code by MathML."""
    parts = _CODE.split(markdown)
    for i in range(0, len(parts), 2):  # code stands at odd places
        text = _DISPLAY.sub(lambda match: _mathml(match[1], 'block'), parts[i])
        parts[i] = _INLINE.sub(lambda match: _mathml(match[1], 'inline'), text)
    return ''.join(parts)


def _mathml(latex: str, display: str) -> str:
    return convert(latex.strip(), display=display).replace('\n', '')
