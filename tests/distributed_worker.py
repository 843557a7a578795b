"""Training in a process group with timm's task, optimizer factory and loader, for test_distributed.py."""
import torch
import torch.distributed as dist
import torch.nn as nn
from timm.data import create_loader
from timm.layers import freeze_batch_norm_2d
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
from torch.utils.data import Dataset

import timm_rep
from tests.helpers import normal_scales, tiny
from timm_rep.layers import csla_layers
from timm_rep.optim import get_grad_mult


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
