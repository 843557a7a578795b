"""A CSLA block as the sum of its branches, one convolution for each (RepOptimizers, figure 1)."""
import torch.nn.functional as F

from timm_rep.layers import IdentityBranch


def branch_by_branch(csla, weights, scales, x):
    """The sum of the feature maps of the branches."""
    total = 0
    for branch in csla.branches:
        weight = weights[branch.name]
        if isinstance(branch, IdentityBranch):
            total = total + x * weight[:, None, None]
            continue
        padding = [k // 2 * d for k, d in zip(branch.kernel_size, csla.dilation)]
        y = F.conv2d(x, weight, stride=csla.stride, padding=padding, dilation=csla.dilation, groups=csla.groups)
        total = total + y * scales[branch.name][:, None, None]
    return total
