"""A search whose result does not depend on the number of processes; run by torchrun from test_distributed.py.

Arguments: where to save, images in all processes' batches, epochs after which to exit (0 for none).
"""
import sys

import timm
import torch
import torch.distributed as dist
from timm.layers import freeze_batch_norm_2d
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import timm_rep
from timm_rep.scales import Scales

TINY = dict(depths=(1, 2, 1, 1), widths=(8, 8, 16, 16), stem_width=8, num_classes=4)


class Loader:
    """A loader that records the seed of each epoch, and ends the process after some epochs."""

    def __init__(self, loader, epochs):
        self.loader, self.epochs, self.sampler = loader, epochs, loader.sampler
        self.seeds = []

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        if len(self.seeds) == self.epochs > 0:
            dist.barrier()  # the checkpoint of the epoch before is written
            sys.exit(0)
        self.seeds.append(torch.initial_seed())
        return iter(self.loader)


def search(path, batch_size, killed_after=0, world_size=1, rank=0):
    torch.manual_seed(0)
    model = timm.create_model('repopt_vgg_a0', structure='search', dtype=torch.float64, **TINY)
    model = freeze_batch_norm_2d(model)  # statistics of half a batch are others
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 3, 32, 32, generator=g, dtype=torch.float64), torch.arange(48) % 4)
    loader = Loader(
        DataLoader(data, batch_size // world_size, sampler=DistributedSampler(data, world_size, rank)), killed_after)
    scales = timm_rep.hyper_search(
        model, loader, lr=1., epochs=3, warmup_epochs=1, checkpoint=f'{path}.checkpoint', resume=True, progress=False)
    return Scales(scales, {'seeds': str(loader.seeds)})


def main(path, batch_size, killed_after):
    dist.init_process_group('gloo')
    scales = search(path, batch_size, killed_after, dist.get_world_size(), dist.get_rank())
    scales.save(f'{path}.{dist.get_rank()}.safetensors')
    dist.destroy_process_group()


if __name__ == '__main__':
    main(sys.argv[1], *map(int, sys.argv[2:]))
