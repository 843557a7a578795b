import re

import pytest
import timm

from tests.convert.families import CLASSES
from timm_rep.cli import main
from timm_rep.convert import Convertibility, survey_convertible
from timm_rep.convert.ffn_classes import _BUILT_IN


def test_models_of_a_pattern():
    reason = 'normalizes over all positions (global response norm)'
    assert list(survey_convertible('convnext*_atto')) == [
        Convertibility('convnext', 'convnext_atto', {'Mlp': 12}, {}, {}, 0),
        Convertibility('convnext', 'convnextv2_atto', {}, {reason: 12}, {}, 0),
    ]
    assert list(survey_convertible('repa_*')) == []  # timm's own only


def test_order_of_the_families(monkeypatch):
    monkeypatch.setattr(timm, 'list_models', lambda: ['fasternet_t0', 'gernet_s'])
    assert [row.family for row in survey_convertible('*')] == ['byobnet', 'fasternet']


@pytest.mark.slow
def test_sums_of_linear_branches():
    row, = survey_convertible('repvgg_a0')
    # three branches in all blocks but the stem and the first of each stage
    assert (row.sums, row.branches, row.classes) == ({'RepVggBlock': 22}, 3 * 22 - 5, {})
    row, = survey_convertible('fastvit_t8')
    assert row.sums == {'MobileOneBlock': 7, 'ReparamLargeKernelConv': 3, 'RepMixer': 10}
    assert row.classes
    # one convolution of 3 x 3 where there were one of 3 x 3 and one of 1 x 1, and the same head
    row, = survey_convertible('repvgg_a0')
    assert 1 < row.macs_ratio < 10 / 9
    row, = survey_convertible('mobileone_s0')
    assert 3 < row.macs_ratio < 5  # four branches of the same size


def test_command(capsys):
    assert main(['models', '--convertible', 'visformer*']) == 0
    header, small, tiny, _, summary = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ['family', 'model', 'FFNs']
    assert tiny.split(maxsplit=3) == [
        'visformer', 'visformer_tiny', '8',
        'SpatialMlp; 7 stay: each has a convolution between its linear layers']
    assert small.split()[1] == 'visformer_small'
    assert summary == (
        '2 of these 2 models have FFNs that convert_to_repa() converts, 0 have parallel linear branches that '
        'convert_to_repopt() converts.')
    assert main(['models', '--convertible', 'mobileone_s1']) == 0
    out = capsys.readouterr().out
    assert '0  39 MobileOneBlock of linear branches; ' in out
    assert re.search(r'branches, 1\.\d\dx', out)
    assert main(['models', '--convertible']) == 1
    assert '--convertible' in capsys.readouterr().err
    assert main(['models', '--convertible', 'nothing*']) == 1
    assert "'nothing*'" in capsys.readouterr().err


def test_every_ffn_class_has_a_test():
    tested = {family.split(':')[0].split()[0].rstrip(',') for family in CLASSES}
    classes = {name.rpartition('.')[2] for name, _ in _BUILT_IN}
    classes -= {'ConvBlock', 'BlockESE'}  # with iformer's FFN, and in a test of its own
    assert tested == classes


@pytest.mark.slow
def test_all_families():
    """The model with the shortest name in each file of timm.models; for mlp_mixer, a mixer instead of its gMLP."""
    families = {'timm.models.mlp_mixer': 'mixer_b16_224'}
    for name in sorted(timm.list_models(), key=len):
        families.setdefault(timm.models.model_entrypoint(name).__module__, name)
    rows = {row.family: row for name in families.values() for row in survey_convertible(name)}
    assert len(rows) >= 95
    without = {'convmixer', 'densenet', 'efficientformer_v2', 'gemma4_vit', 'pvt_v2', 'resnet', 'vgg'}
    with_ffns = {
        'beit', 'coat', 'convnext', 'deit', 'eva', 'iformer', 'levit', 'mlp_mixer', 'vision_transformer', 'vitamin',
        'xcit'}
    assert not any(rows[family].classes for family in without)
    assert all(rows[family].classes for family in with_ffns)
    assert sum(bool(row.classes) for row in rows.values()) >= 54
    assert {family for family, row in rows.items() if row.sums} >= {'fastvit', 'repghost', 'lcnetv2', 'iformer'}
