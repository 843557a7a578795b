"""Where torch may round float32 to TF32: each setting in a process of its own, since torch refuses some mixtures."""
import os

import pytest
import torch

from timm_rep.layers.tf32 import convolution_uses_tf32, matmul_uses_tf32

backends = torch.backends
has_precisions = hasattr(backends.cuda.matmul, 'fp32_precision')  # torch 2.9
needs_precisions = pytest.mark.skipif(not has_precisions, reason='this torch has no fp32_precision')


def in_a_fork(code):
    """matmul_uses_tf32() and convolution_uses_tf32() in a fork of this process in which code was executed."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            exec(code, {'torch': torch})
            os.write(write, bytes([matmul_uses_tf32(), convolution_uses_tf32()]))
        finally:
            os._exit(0)
    os.close(write)
    with open(read, 'rb') as file:
        answer = file.read()
    os.waitpid(pid, 0)
    assert len(answer) == 2
    return tuple(map(bool, answer))


@pytest.mark.parametrize('code,expected', [
    ('pass', (False, True)),
    ("torch.set_float32_matmul_precision('high')", (True, True)),
    ("torch.set_float32_matmul_precision('medium')", (True, True)),
    ('torch.backends.cuda.matmul.allow_tf32 = True', (True, True)),
    ('torch.backends.cudnn.allow_tf32 = False', (False, False)),
    *(pytest.param(code, expected, marks=needs_precisions) for code, expected in (
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", (True, True)),
        ("torch.backends.cudnn.conv.fp32_precision = 'ieee'", (False, False)),
        ("torch.backends.fp32_precision = 'tf32'", (True, True)),
    )),
])
def test_settings(code, expected):
    assert in_a_fork(code) == expected
