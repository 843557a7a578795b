"""Fixtures of several files."""
import pytest


@pytest.fixture
def unmeasured(monkeypatch):
    """Quantizes nothing: records which layers would stay in float. Yields them."""
    kept = []

    class Program:
        @classmethod
        def quantize(cls, model, batches, settings, keep_float):
            kept.extend(keep_float)
            program = cls()
            program.model, program.kept = model, list(keep_float)
            return program

        def __call__(self, x):
            return self.model(x)

        def layers(self, x):
            return [], {}

    monkeypatch.setattr('timm_rep.deploy.quantize._program', lambda name: Program)
    return kept
