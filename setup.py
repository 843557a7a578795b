"""The description on the package index: README.md with absolute links. Everything else is in pyproject.toml."""
import re
from pathlib import Path

from setuptools import setup

REPOSITORY = 'https://github.com/timm-rep/timm-rep'


def absolute(match: re.Match) -> str:
    picture, text, path = match.groups()
    return f'{picture}[{text}]({REPOSITORY}/{"raw" if picture else "blob"}/main/{path})'


readme = Path(__file__).with_name('README.md').read_text(encoding='utf-8')
setup(
    long_description=re.sub(r'(!?)\[([^\]]*)\]\((?!https://)([^)]*)\)', absolute, readme),
    long_description_content_type='text/markdown',
)
