"""Run by torchrun from test_distributed.py: searches, and saves what every process found.

Arguments: where to save, images in all processes' batches, epochs to be killed after (0 for none).
"""
import sys

import timm
import torch
import torch.distributed as dist
from timm.layers import freeze_batch_norm_2d
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import timm_rep

TINY = dict(depths=(1, 2, 1, 1), widths=(8, 8, 16, 16), stem_width=8, num_classes=4)


class Killed:
    """A loader that ends the process in an epoch."""

    def __init__(self, loader, epochs):
        self.loader, self.epochs, self.sampler = loader, epochs, loader.sampler

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        if self.epochs == 0:
            dist.barrier()  # the checkpoint of the epoch before is written
            sys.exit(0)
        self.epochs -= 1
        return iter(self.loader)


def main(path, batch_size, killed_after):
    dist.init_process_group('gloo')
    torch.manual_seed(0)
    model = timm.create_model('repopt_vgg_a0', structure='search', dtype=torch.float64, **TINY)
    model = freeze_batch_norm_2d(model)  # statistics of half a batch are others
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 3, 32, 32, generator=g, dtype=torch.float64), torch.arange(48) % 4)
    loader = DataLoader(data, batch_size // dist.get_world_size(), sampler=DistributedSampler(data))
    if killed_after:
        loader = Killed(loader, killed_after)
    scales = timm_rep.hyper_search(
        model, loader, lr=1., epochs=3, warmup_epochs=1, checkpoint=f'{path}.checkpoint', resume=True, progress=False)
    scales.save(f'{path}.{dist.get_rank()}.safetensors')
    dist.destroy_process_group()


if __name__ == '__main__':
    main(sys.argv[1], *map(int, sys.argv[2:]))
