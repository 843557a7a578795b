"""Run by torchrun from test_distributed.py: trains with timm's task, optimizer factory and loader, saves the weights.

Arguments: where to save, the optimizer, the way to parallelize ('ddp' or 'fsdp'), and images in all processes' batches.
"""
import sys

import timm
import torch
import torch.distributed as dist
import torch.nn as nn
from timm.data import create_loader
from timm.layers import freeze_batch_norm_2d
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
from torch.utils.data import Dataset

import timm_rep
from tests.reference.rep_optim import normal_scales
from timm_rep.layers import csla_layers
from timm_rep.optim import get_grad_mult

TINY = dict(depths=(1, 2, 1, 1), widths=(8, 16, 16, 24), stem_width=8, num_classes=4)


class Images(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(0)
        self.images = torch.randn(n, 3, 32, 32, generator=g)
        self.targets = torch.randint(0, 4, (n,), generator=g).tolist()
        self.transform = None  # timm's loader sets it, for PIL images

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


def main(path, opt, parallel, batch_size):
    dist.init_process_group('gloo')
    torch.manual_seed(0)
    model = timm.create_model('repopt_vgg_a0', dtype=torch.float64, **TINY)
    scales = normal_scales(model, seed=1)
    timm_rep.attach_grad_mults(model, scales)
    model = freeze_batch_norm_2d(model)  # torch's SyncBatchNorm is for accelerators only
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
    dist.destroy_process_group()


if __name__ == '__main__':
    main(*sys.argv[1:4], int(sys.argv[4]))
