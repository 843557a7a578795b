"""Functions that the processes of a group run in the tests: training, a conversion from data, Hyper-Search."""
import sys

import timm
import torch
import torch.distributed as dist
import torch.nn as nn
from timm.data import create_loader
from timm.layers import freeze_batch_norm_2d
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import timm_rep
from tests.helpers import normal_scales, tiny
from timm_rep.convert import linearize_ffns
from timm_rep.layers import csla_layers
from timm_rep.optim import get_grad_mult
from timm_rep.scales import Scales


class Images(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(0)
        self.images = torch.randn(n, 3, 32, 32, generator=g)
        self.targets = torch.randint(0, 4, (n,), generator=g).tolist()
        self.transform = None  # set by timm's loader, for PIL images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


def shard(model):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh('cpu', (dist.get_world_size(),))
    for stage in model.stages:
        fully_shard(stage, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(path, opt, parallel, batch_size):
    """Save the weights after two epochs to <path>.<rank>.

    Args:
        path: Prefix of the files.
        opt: Name of the optimizer.
        parallel: 'ddp' or 'fsdp'.
        batch_size: Images in a batch, of all processes together.
    """
    model = tiny('repopt_vgg_a0', num_classes=4, dtype=torch.float64)
    scales = normal_scales(model, seed=1)
    timm_rep.attach_grad_mults(model, scales)
    model = freeze_batch_norm_2d(model)  # torch's SyncBatchNorm requires an accelerator
    loader = create_loader(
        Images(64), (3, 32, 32), batch_size // dist.get_world_size(), is_training=True, num_workers=0, distributed=True,
        use_prefetcher=False, persistent_workers=False)
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    if parallel == 'ddp':
        task.prepare_distributed()
    else:
        shard(model)
        assert any(get_grad_mult(p) is None for p in model.parameters() if p.ndim == 4)
        timm_rep.attach_grad_mults(model, scales)
    for layer in csla_layers(task).values():
        rows = layer.weight.to_local().shape[0] if parallel == 'fsdp' else layer.weight.shape[0]
        assert get_grad_mult(layer.weight).shape[0] == rows
    optimizer = create_optimizer_v2(task, opt=opt, lr=.05 if opt == 'repsgd' else 1e-3, weight_decay=.01)
    model.to('cpu')  # FSDP2's parameters are swapped then, as by a change of device or dtype
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for images, targets in loader:
            loss = task(images.double(), targets)['loss']
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    state = {
        name: value.full_tensor() if hasattr(value, 'full_tensor') else value
        for name, value in model.state_dict().items()
    }
    torch.save(state, f'{path}.{dist.get_rank()}')


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
    model = freeze_batch_norm_2d(model)  # else the statistics would be of half a batch
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 3, 32, 32, generator=g, dtype=torch.float64), torch.arange(48) % 4)
    sampler = DistributedSampler(data)
    loader = Loader(DataLoader(data, batch_size // dist.get_world_size(), sampler=sampler), killed_after)
    scales = timm_rep.hyper_search(
        model, loader, lr=1., epochs=3, warmup_epochs=1, checkpoint=f'{path}.checkpoint', resume=True, progress=False)
    Scales(scales, {'seeds': str(loader.seeds)}).save(f'{path}.{dist.get_rank()}.safetensors')
