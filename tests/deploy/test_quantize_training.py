"""Quantization-aware training comes closer to the float model than rounding it does, and resumes."""
import pytest
import timm
import torch
import torch.nn.functional as F

import timm_rep
from tests.helpers import images as random_images
from tests.helpers import randomize_, relative, tiny
from timm_rep.deploy import quantize_ptq, quantize_qat
from timm_rep.utils.data import Images
from timm_rep.utils.training import evaluate

pytest.importorskip('torchao')
pytestmark = pytest.mark.slow

SMALL = dict(num_classes=4, depths=(1, 1, 1, 1), widths=(8, 8, 8, 8), stem_width=8)
MODELS = {'repopt_vgg_a0': SMALL, 'repvgg_a0': dict(num_classes=4)}


@pytest.mark.parametrize('name', MODELS)
def test_closer_to_the_float_model(images, tmp_path, name):
    torch.manual_seed(0)
    model = timm.create_model(name, **MODELS[name]).eval()
    with torch.no_grad():
        for p in model.parameters():  # inputs of different size, which one range for the tensor suits badly
            if p.ndim == 4:
                p[0] *= 20
    data = Images(model, str(images), val_split='validation', batch_size=10, img_size=64)
    timm_rep.calibrate_batchnorm(model, data.calibration(20))  # as training does
    model.eval()
    before = {key: x.clone() for key, x in model.state_dict().items()}
    ptq = quantize_ptq(model, data.calibration(20), validation_loader=data.validation())

    def train(checkpoint, epochs=8, **kwargs):
        return quantize_qat(model, data, epochs, lr=1e-3, checkpoint=tmp_path / checkpoint, **kwargs)

    qat = train('whole', validation_loader=data.validation())
    assert qat.report.int8 == ptq.report.int8
    assert qat.report.float == ptq.report.float == {}
    assert (qat.report.qat_epochs, qat.report.accuracy.images) == (8, 8)
    assert not model.training
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())

    def divergence(quantized):
        expected, rounded = (evaluate(m, data.calibration(20), torch.device('cpu'))[0] for m in (model, quantized))
        return F.kl_div(rounded.log_softmax(1), expected.log_softmax(1), log_target=True, reduction='batchmean').item()

    assert divergence(qat) < divergence(ptq)
    again = train('whole', resume=True)  # all epochs are done
    x = next(iter(data.validation()))[0]
    torch.testing.assert_close(again.program.graph(x), qat.program.graph(x))


@torch.no_grad()
def test_before_training_it_computes_what_rounding_computes():
    """With other BatchNorms than those that fold, and with dropout, whose rate torchao would change."""
    from timm_rep.deploy.inductor import finish_training, prepare_training, quantize

    model = timm.utils.reparameterize_model(randomize_(tiny('repopt_ghostnet_050', drop_rate=.2)))
    batches = [random_images(8, seed=s) for s in (1, 2)]
    prepared = prepare_training(model, batches[0])
    prepared.train()
    for x in batches:
        prepared(x)
    expected = quantize(model, batches, True, 'minmax', 100.).graph(batches[0])
    error = relative(expected, model(batches[0]))
    assert relative(finish_training(prepared, (3, 64, 64)).graph(batches[0]), model(batches[0])) < 2 * error


def test_wrong_use(images):
    model = timm.create_model('repopt_vgg_a0', **SMALL).eval()
    data = Images(model, str(images), val_split='validation', batch_size=10)
    with pytest.raises(ValueError, match='epochs is a number of epochs, at least 1, got 0'):
        quantize_qat(model, data, 0)
    with pytest.raises(ValueError, match='is in training mode'):
        quantize_qat(model.train(), data, 1)
