"""RePaFormer equations 3 and 4 as plain loops over channels, in float64."""
import torch


def batch_norm(x, mean, var, gamma, beta, eps):
    """x: (tokens, channels), one channel at a time."""
    y = torch.empty_like(x)
    for c in range(x.shape[1]):
        y[:, c] = gamma[c] * (x[:, c] - mean[c]) / (var[c] + eps) ** 0.5 + beta[c]
    return y


def ffn(x, weights, act, active, training=False, eps=1e-5):
    """Equation 3 without the shortcut, with running statistics, or those of the batch in training mode.

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
