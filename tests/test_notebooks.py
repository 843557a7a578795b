"""The notebooks of examples: they run, print what is saved in them, and are small; ``--update-examples`` saves them."""
import os
import re
from pathlib import Path

import pytest

from tests.helpers import ROOT

nbformat = pytest.importorskip('nbformat', reason='nbformat is not installed')
NOTEBOOKS = sorted((ROOT / 'examples' / 'notebooks').glob('*.ipynb'))


def printed(notebook):
    """The lines that the cells print, without their numbers, which depend on the processor."""
    outputs = [output for cell in notebook.cells for output in cell.get('outputs', [])]
    text = ''.join(output.text for output in outputs if output.output_type == 'stream' and output.name == 'stdout')
    return re.sub(r'[\d.]+', '0', text).split()


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_is_small_and_complete(path):
    """At most 200 KB, with the outputs of a run from top to bottom, without warnings or paths of a machine."""
    text = path.read_text()
    assert len(text) < 200_000
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == 'code']
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {'stream', 'display_data'}
    assert not [output for output in outputs if output.get('name') == 'stderr']
    assert not re.search(r'/(?:home|root|work|tmp|Users)/', text)


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, request, tmp_path, monkeypatch):
    nbclient = pytest.importorskip('nbclient', reason='nbclient is not installed')
    pytest.importorskip('ipykernel', reason='ipykernel is not installed')
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')])))
    notebook = nbformat.read(path, as_version=4)
    before = printed(notebook)
    nbclient.NotebookClient(
        notebook, timeout=900, record_timing=False, resources=dict(metadata=dict(path=tmp_path))).execute()
    if request.config.getoption('update_examples'):
        for cell in notebook.cells:
            if cell.cell_type == 'code':
                cell.outputs = [output for output in cell.outputs if output.get('name') != 'stderr']
            for output in cell.get('outputs', []):
                output.get('data', {}).pop('text/plain', None)  # of a figure, its type and address
        Path(path).write_text(nbformat.writes(notebook) + '\n')
    else:
        assert printed(notebook) == before
