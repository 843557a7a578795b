"""RepOptimizers, equation 3 and appendix A, entry by entry."""
import torch


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
