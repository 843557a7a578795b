"""A conversion in a process group, for test_streaming.py."""
import timm
import torch
import torch.distributed as dist

from timm_rep.convert import linearize_ffns

ARGS = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5, init_values=.5)


def convert(path, kwargs):
    """Save the converted weights and the report of each process to <path>.<rank>.

    Args:
        path: Prefix of the files.
        kwargs: Arguments of linearize_ffns().
    """
    torch.manual_seed(0)
    model = timm.create_model('vit_tiny_patch16_224', **ARGS).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    x = torch.randn(41, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    report = linearize_ffns(model, [x[:16], x[16:17], x[17:]], **kwargs)  # the second process has none of a batch
    torch.save((model.state_dict(), report.as_dict()), f'{path}.{dist.get_rank()}')
