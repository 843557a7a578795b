import inspect

import pytest
import timm
import torch

from tests.convert.families import CLASSES
from timm_rep.cli import main
from timm_rep.convert import Convertibility, survey, survey_convertible
from timm_rep.convert.pointwise import _CLASSES, _INLINE, _SEQUENTIALS
from timm_rep.layers import CslaConv2d


def test_models_of_a_pattern():
    reason = 'normalizes over all positions (global response norm)'
    assert list(survey_convertible('convnext*_atto')) == [
        Convertibility('convnext', 2, 'convnext_atto', {'Mlp': 12}, {}, {}, 0),
        Convertibility('convnext', 2, 'convnextv2_atto', {}, {reason: 12}, {}, 0),
    ]
    assert list(survey_convertible('repa_*')) == []  # timm's own only


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
    assert row.step_ratio is None
    row, = survey_convertible('mobileone_s0')
    assert 3 < row.macs_ratio < 5  # four branches of the same size


def test_training_step_is_measured(monkeypatch):
    monkeypatch.setattr(survey, 'model_input_size', lambda model: (3, 32, 32))
    timed = {}

    def time_calls(calls, device, rounds, warmup):
        timed.update(calls)
        return {'model': [3., 8., 5.], 'plain': [1., 2., 1.]}

    monkeypatch.setattr(survey, 'time_calls', time_calls)
    row, = survey_convertible('repghostnet_050', time_steps=True)
    assert row.step_ratio == 4
    models = {name: inspect.getclosurevars(step).nonlocals['model'] for name, step in timed.items()}
    assert [any(isinstance(m, CslaConv2d) for m in model.modules()) for model in models.values()] == [False, True]
    before = {name: model.conv_stem.weight.clone() for name, model in models.items()}
    for name, step in timed.items():
        step()
        assert models[name].training
        assert not torch.equal(models[name].conv_stem.weight, before[name])
    assert [row.step_ratio for row in survey_convertible('resnet10t', time_steps=True)] == [None]


def test_smallest_model_of_every_family(monkeypatch):
    names = [name for pattern in ('visformer*', 'resnet1*t', 'deit_tiny*') for name in timm.list_models(pattern)]
    monkeypatch.setattr(timm, 'list_models', lambda: names)
    found = {c.family: c for c in survey_convertible()}
    assert list(found) == ['deit', 'resnet', 'visformer']
    assert found['resnet'][2:] == ('resnet10t', {}, {}, {}, 0, None, None)
    assert found['resnet'].models == 2
    assert found['visformer'].model == 'visformer_tiny'
    assert found['visformer'].classes == {'SpatialMlp': 8}
    assert found['visformer'].others == {'has a convolution between its linear layers': 7}
    assert found['deit'].model == 'deit_tiny_patch16_224'


@pytest.mark.slow
def test_series_with_other_blocks(monkeypatch):
    names = ['ghostnet_050', 'ghostnetv2_100', 'ghostnetv3_050', 'ghostnetv3_100', 'repvgg_a0', 'repvgg_a1', 'gernet_s']
    monkeypatch.setattr(timm, 'list_models', lambda: names)
    assert [row.model for row in survey_convertible()] == ['gernet_s', 'repvgg_a0', 'ghostnetv2_100', 'ghostnetv3_050']
    assert [row.models for row in survey_convertible()] == [3, 3, 4, 4]


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
    out = capsys.readouterr().out
    assert '0  39 MobileOneBlock of linear branches; ' in out
    assert 'branches, MACs 1.' in out
    assert main(['models', '--time-steps']) == 1
    assert capsys.readouterr().err == 'timm-rep: --time-steps is an option of --convertible.\n'
    assert main(['models', '--convertible', 'nothing*']) == 1
    assert capsys.readouterr().err == "timm-rep: no model of timm matches 'nothing*'.\n"


def test_every_ffn_class_has_a_test():
    tested = {family.split(':')[0].split()[0].rstrip(',') for family in CLASSES}
    classes = {name.rpartition('.')[2] for name in (*_CLASSES, *_INLINE, *_SEQUENTIALS)}
    classes -= {'ConvBlock', 'BlockESE'}  # with iformer's FFN, and in a test of its own
    assert tested == classes


@pytest.mark.slow
def test_all_families(capsys):
    assert main(['models', '--convertible']) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    ffns = {row[0]: int(row[3]) for row in rows if len(row) > 3 and row[1].isdigit() and row[3].isdigit()}
    assert len(ffns) >= 95
    without = {'convmixer', 'densenet', 'efficientformer_v2', 'gemma4_vit', 'pvt_v2', 'resnet', 'vgg'}
    for model in ('mobileone_s0', 'repvgg_b0', 'fastvit_mci0', 'repvit_m0_9', 'repghostnet_050', 'lcnetv2_small'):
        assert any(model == row[2] for row in rows if len(row) > 3)
    assert any(row[2].startswith('ghostnetv3') for row in rows if len(row) > 3)
    assert all((ffns[family] == 0) == (family in without) for family in (
        *without, 'beit', 'coat', 'convnext', 'deit', 'eva', 'iformer', 'levit', 'mlp_mixer', 'vision_transformer',
        'vitamin', 'xcit'))
