from .published import CONFIG, SCALES, WEIGHTS, Published, check_sha256, sha256
from .released import RELEASE, USUAL_RATIO, fetch_released, has_release
from .sources import FoundWeights, find_weights, local_folder, local_tags, organization

__all__ = [
    'CONFIG',
    'RELEASE',
    'SCALES',
    'USUAL_RATIO',
    'WEIGHTS',
    'FoundWeights',
    'Published',
    'check_sha256',
    'fetch_released',
    'find_weights',
    'has_release',
    'local_folder',
    'local_tags',
    'organization',
    'sha256',
]
