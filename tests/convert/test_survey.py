import pytest
import timm

from tests.convert.families import CLASSES
from timm_rep.cli import main
from timm_rep.convert import Convertibility, survey_convertible
from timm_rep.convert.pointwise import _CLASSES, _SEQUENTIALS


def test_models_of_a_pattern():
    reason = 'normalizes over all positions (global response norm)'
    assert list(survey_convertible('convnext*_atto')) == [
        Convertibility('convnext', 2, 'convnext_atto', {'Mlp': 12}, {}, {}, 0),
        Convertibility('convnext', 2, 'convnextv2_atto', {}, {reason: 12}, {}, 0),
    ]
    assert list(survey_convertible('repa_*')) == []  # timm's own only


def test_sums_of_linear_branches():
    row, = survey_convertible('repvgg_a0')
    # three branches in all blocks but the stem and the first of each stage
    assert (row.sums, row.branches, row.classes) == ({'RepVggBlock': 22}, 3 * 22 - 5, {})
    row, = survey_convertible('fastvit_t8')
    assert row.sums == {'MobileOneBlock': 7, 'ReparamLargeKernelConv': 3, 'RepMixer': 10}
    assert row.classes


def test_smallest_model_of_every_family(monkeypatch):
    names = [name for pattern in ('visformer*', 'resnet1*t', 'deit_tiny*') for name in timm.list_models(pattern)]
    monkeypatch.setattr(timm, 'list_models', lambda: names)
    found = {c.family: c for c in survey_convertible()}
    assert list(found) == ['deit', 'resnet', 'visformer']
    assert found['resnet'][2:] == ('resnet10t', {}, {}, {}, 0)
    assert found['resnet'].models == 2
    assert found['visformer'].model == 'visformer_tiny'
    assert found['visformer'].classes == {'SpatialMlp': 8}
    assert found['visformer'].others == {'has a convolution between its linear layers': 7}
    assert found['deit'].model == 'deit_tiny_patch16_224'


def test_command(capsys):
    assert main(['models', '--convertible', 'visformer*']) == 0
    header, tiny, small, _, summary = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ['family', 'models', 'model', 'FFNs']
    assert tiny.split(maxsplit=4) == [
        'visformer', '2', 'visformer_tiny', '8',
        'SpatialMlp; 7 stay: each has a convolution between its linear layers']
    assert small.split()[2] == 'visformer_small'
    assert summary == (
        '2 of these 2 models have FFNs that convert_to_repa() converts, 0 have parallel linear branches that '
        'convert_to_repopt() converts.')
    assert main(['models', '--convertible', 'mobileone_s1']) == 0
    assert '0  39 MobileOneBlock of linear branches' in capsys.readouterr().out
    assert main(['models', '--convertible', 'nothing*']) == 1
    assert capsys.readouterr().err == "timm-rep: no model of timm matches 'nothing*'.\n"


def test_every_ffn_class_has_a_test():
    tested = {family.split(':')[0].split()[0].rstrip(',') for family in CLASSES}
    classes = {name.rpartition('.')[2] for name in (*_CLASSES, *_SEQUENTIALS)}
    classes -= {'ConvBlock', 'BlockESE'}  # with iformer's FFN, and in a test of its own
    assert tested == classes


@pytest.mark.slow
def test_all_families(capsys):
    assert main(['models', '--convertible']) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    ffns = {row[0]: int(row[3]) for row in rows if len(row) > 3 and row[1].isdigit() and row[3].isdigit()}
    assert len(ffns) >= 95
    without = {'convmixer', 'densenet', 'efficientformer_v2', 'gemma4_vit', 'pvt_v2', 'resnet', 'vgg'}
    assert all((ffns[family] == 0) == (family in without) for family in (
        *without, 'beit', 'coat', 'convnext', 'deit', 'eva', 'iformer', 'levit', 'mlp_mixer', 'vision_transformer',
        'vitamin', 'xcit'))
