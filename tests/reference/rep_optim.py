"""RepOptimizers, equation 3 and appendix A, entry by entry."""
import torch

from tests.helpers import normal_scales  # noqa: F401, TODO imported from here by tests


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
