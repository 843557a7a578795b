"""Short implementations of the equations of the papers, in float64, which the tests compare the package with."""
import torch
import torch.nn.functional as F

from timm_rep.layers import IdentityBranch


# a CSLA block as the sum of its branches, one convolution for each (RepOptimizers, figure 1)
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


# RepOptimizers, equation 3 and appendix A, entry by entry
def grad_mult(shape, branches, scales, power):
    """The dense multiplier. branches: (name, kernel size or None for an identity); power of a scale: 2, or abs."""
    mult = torch.zeros(shape, dtype=torch.float64)
    for c in range(shape[0]):
        for name, size in branches:
            if size is None:
                mult[c, c % shape[1], shape[2] // 2, shape[3] // 2] += 1
                continue
            scale = scales[name][c].double().item()
            for p in range(shape[2]):
                for q in range(shape[3]):
                    if abs(p - shape[2] // 2) <= size[0] // 2 and abs(q - shape[3] // 2) <= size[1] // 2:
                        mult[c, :, p, q] += scale ** 2 if power == 2 else abs(scale)
    return mult


def sgd(params, grads, buffers, mults, lr, momentum=0., dampening=0., weight_decay=0., nesterov=False, maximize=False,
        **_):
    """One step of SGD in place, the multiplier on the gradient before weight decay and momentum."""
    for i, (p, g, m) in enumerate(zip(params, grads, mults)):
        d = (-g if maximize else g) * m + weight_decay * p
        if momentum:
            buffers[i] = d.clone() if buffers[i] is None else momentum * buffers[i] + (1 - dampening) * d
            d = d + momentum * buffers[i] if nesterov else buffers[i]
        p -= lr * d


def adamw(params, grads, state, mults, lr, step, betas=(.9, .999), eps=1e-8, weight_decay=.01, **_):
    """A step of AdamW in place, the multiplier on the update. state: running averages of gradients and squares."""
    for i, (p, g, m) in enumerate(zip(params, grads, mults)):
        mean, square = state[i] or (torch.zeros_like(p), torch.zeros_like(p))
        state[i] = mean, square = betas[0] * mean + (1 - betas[0]) * g, betas[1] * square + (1 - betas[1]) * g * g
        update = mean / (1 - betas[0] ** step) / ((square / (1 - betas[1] ** step)).sqrt() + eps)
        p.sub_(lr * (weight_decay * p + m * update))


# RePaFormer, equations 3 and 4, as plain loops over channels
def batch_norm(x, mean, var, gamma, beta, eps):
    """x: (tokens, channels), one channel at a time."""
    y = torch.empty_like(x)
    for c in range(x.shape[1]):
        y[:, c] = gamma[c] * (x[:, c] - mean[c]) / (var[c] + eps) ** 0.5 + beta[c]
    return y


def ffn(x, weights, act, active, training=False, eps=1e-5):
    """Equation 3 without the shortcut, with running statistics, or the batch's in training mode.

    x: (tokens, C). weights: the state dict of a RePaMlp, float64; ``ls.gamma`` in it is a layer scale.
    """
    def norm(name, x):
        mean, var = weights[f'{name}.running_mean'], weights[f'{name}.running_var']
        if training:
            mean = sum(x) / len(x)
            var = sum((row - mean) ** 2 for row in x) / len(x)
        return batch_norm(x, mean, var, weights[f'{name}.weight'], weights[f'{name}.bias'], eps)

    def linear(name, x):
        y = x @ weights[f'{name}.weight'].T
        bias = weights.get(f'{name}.bias')
        return y if bias is None else y + bias

    hidden = linear('fc1', norm('norm1', x))
    hidden = torch.stack([act(h) if c < active else h for c, h in enumerate(hidden.T)], dim=1)
    branch = linear('fc2', norm('norm2', hidden))
    return branch * weights.get('ls.gamma', 1.)


# PoolFormer's token mixer with a BatchNorm and without the shortcut, position by position
def pooling(x, weights, pool_size, training=False, eps=1e-5):
    """x: (N, C, H, W). weights: float64, of the BatchNorm ``norm``; ``ls.gamma`` is a layer scale."""
    mean, var = weights['norm.running_mean'], weights['norm.running_var']
    if training:
        mean = x.mean(dim=(0, 2, 3))
        var = ((x - mean.view(-1, 1, 1)) ** 2).mean(dim=(0, 2, 3))
    y = torch.empty_like(x)
    for c in range(x.shape[1]):
        y[:, c] = weights['norm.weight'][c] * (x[:, c] - mean[c]) / (var[c] + eps) ** 0.5 + weights['norm.bias'][c]
    mixed = torch.empty_like(x)
    reach = pool_size // 2
    for i in range(x.shape[2]):
        for j in range(x.shape[3]):
            neighbours = y[:, :, max(i - reach, 0):i + reach + 1, max(j - reach, 0):j + reach + 1].flatten(2)
            mixed[:, :, i, j] = sum(neighbours.unbind(-1)) / neighbours.shape[-1] - y[:, :, i, j]
    gamma = weights.get('ls.gamma', torch.ones(x.shape[1], dtype=x.dtype))
    return gamma.view(-1, 1, 1) * mixed
