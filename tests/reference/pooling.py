"""PoolFormer's token mixer with a BatchNorm and without the shortcut, position by position, in float64."""
import torch


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
