"""Scales that the authors of RepOptimizers searched and released (MIT license), downloaded from their repository."""
import os
from typing import Dict, NamedTuple, Optional

from huggingface_hub import constants
from timm.models._hub import check_cached_file, get_cache_dir
from torch.hub import download_url_to_file

from timm_rep.utils.network import is_reachable

RELEASED_PREFIX = 'released:'  # begins a source of scales, the name of a model follows

RELEASE_URL = 'https://github.com/DingXiaoH/RepOptimizers/raw/main/'


class ReleasedFile(NamedTuple):
    """A released file of scales.

    Attributes:
        name: File name in the authors' repository.
        sha256: Checksum of the file, in hexadecimal.
    """
    name: str
    sha256: str

    @property
    def url(self) -> str:
        """Address of the file."""
        return RELEASE_URL + self.name

    @property
    def cached_name(self) -> str:
        """File name in timm's cache; timm checks the checksum in it."""
        stem, suffix = os.path.splitext(self.name)
        return f'{stem}-{self.sha256}{suffix}'


# by the model of this package
RELEASED: Dict[str, ReleasedFile] = {
    'repopt_vgg_b1': ReleasedFile(
        'RepOpt-VGG-B1-scales.pth', '9b35d848b636fb17b3775f48054806b19b92d8ff113ad368d3ebfc762d10dc36'),
    'repopt_vgg_b2': ReleasedFile(
        'RepOpt-VGG-B2-scales.pth', 'cee5003829df36e683f35064d7957a044326418a07ff53754bee7db499d1b0a0'),
    'repopt_vgg_l1': ReleasedFile(
        'RepOpt-VGG-L1-scales.pth', '5c02fa844cd5b15bca520ac278b17bf853d5c2f15ef6739bc6c93cd3cb34e446'),
    'repopt_vgg_l2': ReleasedFile(
        'RepOpt-VGG-L2-scales.pth', '50db188177ede982f26eda0b2569f2aaad1db9b5ffa42287baf6fdd772db5728'),
    'repopt_ghostnet_050': ReleasedFile(
        'RepOptGhostNet_0_5x_scales.pth', 'd21b2e5d9eeee06fc46120fcc75084a6403a050bfad262e855167aee0404bd18'),
}


def locate_released(model_name: str) -> str:
    """The path of released scales in timm's cache of checkpoints, downloaded if necessary; the checksum is verified.

    Args:
        model_name: Key of :data:`RELEASED`.

    Raises:
        FileNotFoundError: The file is not cached, and cannot be downloaded, or ``HF_HUB_OFFLINE`` is set.
        ValueError: No scales were released for this model.
    """
    if model_name not in RELEASED:
        raise ValueError(
            f'Expected a model with released scales, one of {", ".join(RELEASED)}, but got {model_name!r}. Search '
            "scales for it with timm-rep hyper-search, or pass scales='init'.")
    file = RELEASED[model_name]
    path = os.path.join(get_cache_dir(), file.cached_name)
    if not check_cached_file((file.url, file.cached_name)):
        reason = _download(file, path)
        if reason:
            raise FileNotFoundError(
                f'Cannot download the released scales of {model_name}: {reason}. Download {file.url} by hand, and pass '
                f'the path of the file as scales=.')
    return path


def _download(file: ReleasedFile, path: str) -> Optional[str]:
    """Download a file, replacing an incomplete or corrupt one. Returns the reason if that fails."""
    if constants.HF_HUB_OFFLINE:
        return 'HF_HUB_OFFLINE is set'
    if not is_reachable(file.url):  # torch's download has no time limit
        return 'the server does not answer'
    try:
        download_url_to_file(file.url, path, hash_prefix=file.sha256, progress=False)
    except (OSError, RuntimeError) as e:  # no connection, no such file, wrong checksum
        return str(e)
    return None
