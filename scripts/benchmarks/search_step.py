"""Training step of Hyper-Search: search-step."""
import timm
import torch
import torch.nn.functional as F

from timm_rep.layers import CslaBlock, IdentityBranch
from timm_rep.utils.profiling import time_calls

from .repa_train import TrainingStep
from .timing import speedup, timing_columns

__all__ = ['search_step']


class FeatureMaps(CslaBlock):
    """A search block with one convolution for each branch, as in the released code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = 0
        for branch in self.csla.branches:
            weight = self.weights[branch.name]
            if isinstance(branch, IdentityBranch):
                y = y + x * weight[:, None, None]
                continue
            z = F.conv2d(
                x, weight, stride=self.csla.stride, padding=self.csla.padding(branch.kernel_size),
                dilation=self.csla.dilation, groups=self.csla.groups)
            y = y + z * self.scales[branch.name][:, None, None]
        return y


def _step(name: str, args, memory_format: torch.memory_format, feature_maps: bool) -> TrainingStep:
    torch.manual_seed(0)
    model = timm.create_model(name, structure='search', num_classes=100).to(args.device, memory_format=memory_format)
    if feature_maps:
        for layer in model.modules():
            if isinstance(layer, CslaBlock):
                layer.__class__ = FeatureMaps
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True)
    x = torch.randn(args.batch_size, 3, 32, 32, device=args.device).contiguous(memory_format=memory_format)
    return TrainingStep(model.train(), x, optimizer=optimizer, amp=args.amp)


def search_step(args):
    """Training step of the search structure on 32 x 32 images: branches summed as kernels or as feature maps.

    'ratio': speedup of kernels, this package's form, over feature maps, the released one.
    """
    formats = {'contiguous': torch.contiguous_format, 'channels-last': torch.channels_last}
    for row in args.pending(model=args.models or ['repopt_vgg_a0', 'repopt_ghostnet_050'], memory=formats):
        if args.device.type == 'cpu' and row['memory'] == 'channels-last' and 'vgg' in row['model']:
            continue  # some builds of torch crash in the channels-last backward of a strided 1 x 1 convolution
        steps = {
            side: _step(row['model'], args, formats[row['memory']], side == 'feature maps')
            for side in ('kernels', 'feature maps')}
        times = time_calls(steps, args.device, args.rounds, warmup=2)
        yield {**row, 'ratio': speedup(times['kernels'], times['feature maps']), **timing_columns(times)}
