"""Quantization-aware training comes closer to the float model than rounding it does, and resumes."""
import pytest
import timm
import torch
import torch.nn.functional as F

import timm_rep
from tests.helpers import images as random_images
from tests.helpers import randomize_, relative, tiny
from timm_rep.deploy import quantize_qat
from timm_rep.deploy.program import QuantizationSettings
from timm_rep.utils.data import Images

pytest.importorskip('torchao')
pytestmark = pytest.mark.slow

SMALL = dict(num_classes=4, depths=(1, 1, 1, 1), widths=(8, 8, 8, 8), stem_width=8)


def divergence(logits, expected):
    return F.kl_div(logits.log_softmax(1), expected.log_softmax(1), log_target=True, reduction='batchmean')


def test_closer_to_the_float_model():
    from timm_rep.deploy.inductor import InductorProgram, finish_training, prepare_training

    torch.manual_seed(0)
    model = timm.create_model('repopt_vgg_a0', **SMALL)
    x = random_images(20)
    with torch.no_grad():
        for p in model.parameters():  # channels of different size, which one range for the tensor suits badly
            if p.ndim == 4:
                p[0] *= 20
        model.head.fc.weight *= 100  # logits of a trained model's size
    timm_rep.calibrate_batchnorm(model, [x])
    model = timm.utils.reparameterize_model(model.eval())
    expected = model(x).detach()
    rounded = InductorProgram.quantize(model, [x], QuantizationSettings(True, 'minmax', 100.)).graph
    prepared = prepare_training(model, x)
    optimizer = torch.optim.AdamW(prepared.parameters(), 1e-4, weight_decay=0.)
    for _ in range(30):
        loss = divergence(prepared(x), expected)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        y = prepared(x)
    trained = finish_training(prepared, (3, 64, 64)).graph
    assert relative(trained(x), y) < 1e-4  # rounding as in the training
    assert divergence(trained(x), expected) < 0.8 * divergence(rounded(x), expected)


def test_trains_on_images_and_resumes(images, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model('repopt_vgg_a0', **SMALL).eval()
    before = {key: x.clone() for key, x in model.state_dict().items()}
    data = Images(model, str(images), val_split='validation', batch_size=10, img_size=64)

    def train(**kwargs):
        return quantize_qat(model, data, 2, checkpoint=tmp_path / 'state', **kwargs)

    quantized = train(validation_loader=data.validation())
    folded = timm.utils.reparameterize_model(model)
    assert quantized.report.int8_layers == [name for name, m in folded.named_modules() if hasattr(m, 'weight')]
    assert quantized.report.float_layers == {}
    assert (quantized.report.qat_epochs, quantized.report.accuracy.images) == (2, 8)
    assert not model.training
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    again = train(resume=True)  # all epochs are done
    x = next(iter(data.validation()))[0]
    torch.testing.assert_close(again.program.graph(x), quantized.program.graph(x))


@torch.no_grad()
def test_before_training_it_computes_what_rounding_computes():
    """With other BatchNorms than those that fold, and with dropout, whose rate torchao would change."""
    from timm_rep.deploy.inductor import InductorProgram, finish_training, prepare_training

    model = timm.utils.reparameterize_model(randomize_(tiny('repopt_ghostnet_050', drop_rate=.2)))
    batches = [random_images(8, seed=s) for s in (1, 2)]
    prepared = prepare_training(model, batches[0])
    prepared.train()
    for x in batches:
        prepared(x)
    expected = InductorProgram.quantize(model, batches, QuantizationSettings(True, 'minmax', 100.)).graph(batches[0])
    error = relative(expected, model(batches[0]))
    assert relative(finish_training(prepared, (3, 64, 64)).graph(batches[0]), model(batches[0])) < 2 * error


def test_wrong_use(images):
    model = timm.create_model('repopt_vgg_a0', **SMALL).eval()
    data = Images(model, str(images), val_split='validation', batch_size=10)
    with pytest.raises(ValueError, match='epochs must be an integer >= 1, got 0'):
        quantize_qat(model, data, 0)
    with pytest.raises(ValueError, match=r'lr must be .* got nan'):
        quantize_qat(model, data, 1, lr=float('nan'))
    with pytest.raises(ValueError, match='must be in eval mode'):
        quantize_qat(model.train(), data, 1)
