"""Hyper-Search in a process group, for test_distributed.py."""
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
            dist.barrier()  # until the checkpoint of the previous epoch is written
            sys.exit(0)
        self.seeds.append(torch.initial_seed())
        return iter(self.loader)


def search(path, batch_size, killed_after):
    """Save the scales of each process to <path>.<rank>.safetensors, with the seeds of its epochs as metadata.

    Args:
        path: Prefix of the files.
        batch_size: Images in a batch, of all processes together.
        killed_after: Epochs after which the processes exit; 0 for none.
    """
    torch.manual_seed(0)
    model = timm.create_model('repopt_vgg_a0', structure='search', dtype=torch.float64, **TINY)
    model = freeze_batch_norm_2d(model)  # else the statistics would be those of half a batch
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 3, 32, 32, generator=g, dtype=torch.float64), torch.arange(48) % 4)
    sampler = DistributedSampler(data)
    loader = Loader(DataLoader(data, batch_size // dist.get_world_size(), sampler=sampler), killed_after)
    scales = timm_rep.hyper_search(
        model, loader, lr=1., epochs=3, warmup_epochs=1, checkpoint=f'{path}.checkpoint', resume=True, progress=False)
    Scales(scales, {'seeds': str(loader.seeds)}).save(f'{path}.{dist.get_rank()}.safetensors')
